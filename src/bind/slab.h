#pragma once

#include <pybind11/pybind11.h>

namespace rocket::bind {

void add_slab(pybind11::module_& m);  // FuelSlab

}  // namespace rocket::bind
