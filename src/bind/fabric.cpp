#include "bind/fabric.h"

#include <memory>
#include <string>

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
      .def("leave", &Fabric::leave, released)
      .def("abort", &Fabric::abort, py::arg("status"), released);
  m.def(
      "mpi_fabric",
      [](double limit_seconds) {
        if (!(limit_seconds > 0)) throw InputError("mpi_fabric: expected a time limit above 0");
        return mpi_fabric(limit_seconds);
      },
      py::arg("limit_seconds"), released);
}

}  // namespace rocket::bind
