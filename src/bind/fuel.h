#pragma once

#include <pybind11/pybind11.h>

namespace rocket::bind {

void add_fuel(pybind11::module_& m);  // read_headers, read_config

}  // namespace rocket::bind
