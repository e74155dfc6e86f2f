#include "bind/slab.h"

#include <string>

#include "runtime/fuel_slab.h"

namespace py = pybind11;

namespace rocket::bind {
namespace {

// Called without the GIL; an exception in it, or a signal, stops the work.
FuelSlab::Progress progress_of(const py::object& progress) {
  return [&progress](int64_t done, int64_t total) {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!progress.is_none()) progress(done, total);
  };
}

}  // namespace

void add_slab(py::module_& m) {
  py::class_<FuelSlab>(m, "FuelSlab")
      .def(py::init(&open_fuel_slab), py::arg("fuel_dir"), py::arg("slab_dir"))
      .def_property_readonly("file_bytes", [](const FuelSlab& s) { return s.plan().file_bytes; })
      .def_property_readonly("experts", [](const FuelSlab& s) { return s.plan().experts; })
      .def_property_readonly("layers", [](const FuelSlab& s) { return s.plan().layers; })
      .def_property_readonly("slot_bytes", [](const FuelSlab& s) { return s.plan().slot_bytes; })
      .def_property_readonly("path", [](const FuelSlab& s) { return s.plan().path; })
      .def("written", &FuelSlab::written)
      .def(
          "write",
          [](FuelSlab& s, const py::object& progress) {
            const FuelSlab::Progress tell = progress_of(progress);
            py::gil_scoped_release release;
            s.write(tell);
          },
          py::arg("progress") = py::none())
      .def(
          "verify",
          [](FuelSlab& s, const py::object& progress) {
            const FuelSlab::Progress tell = progress_of(progress);
            py::gil_scoped_release release;
            s.verify(tell);
          },
          py::arg("progress") = py::none());
}

}  // namespace rocket::bind
