// The Python module rocket._core: a thin layer over Engine. The stub is python/rocket/_core.pyi.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "bind/engine.h"
#include "bind/experts.h"
#include "bind/fabric.h"
#include "bind/fuel.h"
#include "bind/slab.h"
#include "ops/table.h"
#include "runtime/device.h"
#include "runtime/device_rates.h"
#include "runtime/read_rate.h"

namespace py = pybind11;

namespace rocket::bind {
namespace {

// A Python class for each typed error; instances carry `hint`.
py::object error_class(py::module_& m, const char* name, const py::object& base) {
  py::dict members;
  members["hint"] = "";
  members["__module__"] = "rocket";
  py::object type = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyType_Type));
  py::object cls = type(name, py::make_tuple(base), members);
  m.attr(name) = cls;
  return cls;
}

struct ErrorClasses {
  py::object error, fuel, plan, input, device;
};

void raise(const py::object& cls, const Error& error) {
  py::object instance = cls(error.what());
  instance.attr("hint") = error.hint();
  PyErr_SetObject(cls.ptr(), instance.ptr());
}

void add_errors(py::module_& m) {
  // Never freed: exceptions may be raised while the interpreter shuts down.
  static ErrorClasses* classes = new ErrorClasses;
  const py::object base = py::reinterpret_borrow<py::object>(PyExc_Exception);
  classes->error = error_class(m, "Error", base);
  classes->fuel = error_class(m, "FuelError", classes->error);
  classes->plan = error_class(m, "PlanError", classes->error);
  classes->input = error_class(m, "InputError", classes->error);
  classes->device = error_class(m, "DeviceError", classes->error);
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const FuelError& e) {
      raise(classes->fuel, e);
    } catch (const PlanError& e) {
      raise(classes->plan, e);
    } catch (const InputError& e) {
      raise(classes->input, e);
    } catch (const DeviceError& e) {
      raise(classes->device, e);
    } catch (const Error& e) {
      raise(classes->error, e);
    }
  });
}

void check_rate_arguments(const char* name, int64_t bytes, int threads, double seconds) {
  if (bytes < 0 || threads < 0 || !(seconds >= 0) || seconds > 3600) {
    throw InputError(std::string(name) + ": bytes, threads and seconds must not be negative");
  }
}

// (rates, "") or (None, why there is nothing to measure)
py::tuple measure_device(double seconds) {
  check_rate_arguments("device_rates", 0, 0, seconds);
  std::string why;
  std::optional<DeviceRates> rates;
  {
    py::gil_scoped_release release;
    rates = device_rates(seconds, &why);
  }
  if (!rates) return py::make_tuple(py::none(), why);
  py::dict d;
  d["name"] = rates->name;
  d["unified"] = rates->unified;
  d["total_bytes"] = rates->total_bytes;
  d["free_bytes"] = rates->free_bytes;
  d["read_gb_s"] = rates->read_gb_s;
  d["copy_gb_s"] = rates->copy_gb_s;
  d["pinned_to_gb_s"] = rates->pinned_to_gb_s;
  d["pageable_to_gb_s"] = rates->pageable_to_gb_s;
  d["pinned_from_gb_s"] = rates->pinned_from_gb_s;
  return py::make_tuple(d, "");
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ engine of Rocket.";
  m.attr("__version__") = ROCKET_VERSION;
#ifdef ROCKET_WITH_CUDA
  m.attr("cuda_built") = true;
#else
  m.attr("cuda_built") = false;
#endif
  add_errors(m);
  add_fabric(m);
  add_engine(m);
  add_fuel(m);
  add_experts(m);
  add_slab(m);
  m.def(
      "read_rate_gb_s",
      [](int64_t bytes, int threads, double seconds) {
        check_rate_arguments("read_rate_gb_s", bytes, threads, seconds);
        py::gil_scoped_release release;
        ThreadPool pool(threads);
        return read_rate_gb_s(pool, bytes, seconds);
      },
      py::arg("bytes") = 0, py::arg("threads") = 0, py::arg("seconds") = 0.5);
  m.def(
      "copy_rate_gb_s",
      [](int64_t bytes, int threads, double seconds) {
        check_rate_arguments("copy_rate_gb_s", bytes, threads, seconds);
        py::gil_scoped_release release;
        ThreadPool pool(threads);
        return copy_rate_gb_s(pool, bytes, seconds);
      },
      py::arg("bytes") = 0, py::arg("threads") = 0, py::arg("seconds") = 0.5);
  m.def(
      "device_read_rate_gb_s",
      [](double seconds) {
        check_rate_arguments("device_read_rate_gb_s", 0, 0, seconds);
        py::gil_scoped_release release;
        const double rate = device_read_gb_s(seconds);
        return rate > 0 ? std::optional<double>(rate) : std::nullopt;
      },
      py::arg("seconds") = 0.5);
  m.def("device_rates", &measure_device, py::arg("seconds") = 0.5);
  m.def("cuda_devices", [] {
    std::string why;
    std::vector<std::string> names;
    for (const CudaDevice& device : cuda_devices(&why)) names.push_back(device.name);
    return py::make_tuple(names, why);
  });
  m.def("memory_available", [] {
    const MemoryAvailable available = memory_available();
    return py::make_tuple(available.bytes, available.source);
  });
  m.def("cpu_name", [] { return cpu_name(); });
  m.def("cpu_isa", [] { return std::string(cpu_ops_isa()); });
  m.def("cpus", [] { return ThreadPool::available_cpus(); });
}

}  // namespace rocket::bind
