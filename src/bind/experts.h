#pragma once

#include <pybind11/pybind11.h>

namespace rocket::bind {

void add_experts(pybind11::module_& m);  // replay_routing, TraceWriter, read_trace

}  // namespace rocket::bind
