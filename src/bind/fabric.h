#pragma once

#include <pybind11/pybind11.h>

namespace rocket::bind {

void add_fabric(pybind11::module_& m);  // Fabric, mpi_fabric

}  // namespace rocket::bind
