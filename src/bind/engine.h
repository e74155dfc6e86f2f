#pragma once

#include <pybind11/pybind11.h>

namespace rocket::bind {

void add_engine(pybind11::module_& m);  // Row, SamplingParams, CoreEngine

}  // namespace rocket::bind
