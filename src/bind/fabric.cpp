#include "bind/fabric.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "fabric/fabric.h"

namespace py = pybind11;

namespace rocket::bind {

void add_fabric(py::module_& m) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<Fabric, std::shared_ptr<Fabric>>(m, "Fabric")
      .def_property_readonly("rank", &Fabric::rank)
      .def_property_readonly("ranks", &Fabric::ranks)
      .def_property_readonly("library", &Fabric::library)
      .def_property_readonly("failed", &Fabric::failed)
      .def_property_readonly("rank0_knows", &Fabric::rank0_knows)
      .def("fail", &Fabric::fail, py::arg("message"), py::arg("hint"), released)
      // Messages of the commands themselves: see Fabric.
      .def(
          "gather",
          [](Fabric& fabric, const std::string& mine, const std::string& what) {
            std::vector<std::string> all;
            {
              const py::gil_scoped_release release;
              all = fabric.gather(mine, what);
            }
            return std::vector<py::bytes>(all.begin(), all.end());
          },
          py::arg("mine"), py::arg("what"))
      .def(
          "tell", [](Fabric& fabric, const std::string& message) { fabric.tell(message); },
          py::arg("message"), released)
      .def(
          "hear",
          [](Fabric& fabric, const std::string& what) {
            std::string message;
            {
              const py::gil_scoped_release release;
              message = fabric.hear(what);
            }
            return py::bytes(message);
          },
          py::arg("what"))
      .def("leave", &Fabric::leave, released)
      .def("abort", &Fabric::abort, py::arg("status"), released);
  m.def(
      "mpi_fabric",
      [](double limit_seconds) {
        if (!(limit_seconds > 0)) throw InputError("mpi_fabric: expected a time limit above 0");
        return mpi_fabric(limit_seconds, [] {  // Ctrl-C need not wait for ranks that do not come
          const py::gil_scoped_acquire acquire;
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        });
      },
      py::arg("limit_seconds"), released);
}

}  // namespace rocket::bind
