#include "bind/experts.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "experts/replay.h"
#include "experts/trace.h"

namespace py = pybind11;

namespace rocket::bind {
namespace {

using Ids = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Numbers = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

template <typename T>
py::array_t<T> table(const std::vector<T>& values, py::ssize_t rows, py::ssize_t columns) {
  return py::array_t<T>({rows, columns}, values.data());
}

void check_steps(const Ids& ids, const Numbers& step_ends) {
  if (ids.ndim() != 3 || step_ends.ndim() != 1) {
    throw InputError("replay_routing: expected ids [rows, layers, top-k] and step_ends [steps]");
  }
  int64_t before = 0;
  for (py::ssize_t i = 0; i < step_ends.size(); ++i) {
    const int64_t end = step_ends.data()[i];
    if (end < before || end > ids.shape(0)) {
      throw InputError("replay_routing: step_ends: expected ascending row numbers up to " +
                       std::to_string(ids.shape(0)) + ", found " + std::to_string(end));
    }
    before = end;
  }
}

// (look-ups [steps, layers], misses [steps, layers], evictions [layers], slots delivered)
py::tuple replay_routing(const Ids& ids, const Numbers& step_ends, int32_t experts, int32_t topk,
                         int64_t slots, std::vector<int64_t> layer_slots, std::vector<int32_t> owned,
                         const std::string& policy, bool many_rows) {
  check_steps(ids, step_ends);
  CacheConfig config;
  config.layers = static_cast<int32_t>(ids.shape(1));
  config.experts = experts;
  config.topk = topk;
  config.slots = slots;
  config.layer_slots = std::move(layer_slots);
  config.owned = std::move(owned);
  config.policy = policy;
  config.many_rows = many_rows;
  const py::ssize_t steps = step_ends.size();
  const RoutingView routing{ids.data(),
                            {step_ends.data(), static_cast<size_t>(steps)},
                            config.layers,
                            static_cast<int32_t>(ids.shape(2))};
  ReplayCounts counts;
  {
    py::gil_scoped_release release;
    counts = replay(routing, config);
  }
  std::vector<int64_t> evictions;
  for (const CacheCounters& layer : counts.layers) evictions.push_back(layer.evictions);
  return py::make_tuple(table(counts.lookups, steps, config.layers),
                        table(counts.misses, steps, config.layers), evictions, counts.slots);
}

struct Trace {
  std::vector<int32_t> ids;
  std::vector<TraceRow> rows;
};

Trace read_rows(TraceReader& reader) {
  Trace trace;
  const size_t width = reader.header().ids();
  std::vector<int32_t> ids(width);
  TraceRow row;
  while (reader.next(&row, ids)) {
    trace.ids.insert(trace.ids.end(), ids.begin(), ids.end());
    trace.rows.push_back(row);
  }
  return trace;
}

py::dict read_trace(const std::string& path) {
  TraceReader reader(path);
  Trace trace;
  {
    py::gil_scoped_release release;
    trace = read_rows(reader);
  }
  const TraceHeader& header = reader.header();
  const py::ssize_t rows = static_cast<py::ssize_t>(trace.rows.size());
  const auto column = [&](auto field) {
    py::array_t<int64_t> values(rows);
    std::transform(trace.rows.begin(), trace.rows.end(), values.mutable_data(), field);
    return values;
  };
  py::dict d;
  d["layers"] = header.layers;
  d["experts"] = header.experts;
  d["topk"] = header.topk;
  d["fingerprint"] = header.fingerprint;
  d["ids"] = py::array_t<int32_t>(
      {rows, static_cast<py::ssize_t>(header.layers.size()), static_cast<py::ssize_t>(header.topk)},
      trace.ids.data());
  d["step"] = column([](const TraceRow& row) { return int64_t{row.step}; });
  d["stream"] = column([](const TraceRow& row) { return int64_t{row.stream}; });
  d["position"] = column([](const TraceRow& row) { return int64_t{row.position}; });
  d["prefill"] = column([](const TraceRow& row) { return int64_t{row.prefill}; });
  d["torn_bytes"] = reader.torn_bytes();
  return d;
}

// One call a step: ids [rows, layers, top-k]; rows as (stream, position, prefill).
void write_step(TraceWriter& writer, const std::vector<std::tuple<uint32_t, uint32_t, bool>>& rows,
                const Ids& ids) {
  if (ids.ndim() != 3 || static_cast<size_t>(ids.shape(0)) != rows.size()) {
    throw InputError("TraceWriter.step: expected ids [rows, layers, top-k] for " +
                     std::to_string(rows.size()) + " rows");
  }
  std::vector<TraceRow> about;
  for (const auto& [stream, position, prefill] : rows) about.push_back({0, stream, position, prefill});
  writer.begin_step(about);
  const py::ssize_t layers = ids.shape(1), topk = ids.shape(2);
  std::vector<int32_t> layer_ids(static_cast<size_t>(ids.shape(0) * topk));
  for (py::ssize_t layer = 0; layer < layers; ++layer) {
    for (py::ssize_t row = 0; row < ids.shape(0); ++row) {
      std::copy_n(ids.data(row, layer, 0), topk, layer_ids.begin() + row * topk);
    }
    writer.layer(static_cast<int32_t>(layer), layer_ids);
  }
  writer.end_step();
}

}  // namespace

void add_experts(py::module_& m) {
  m.attr("TRACE_MAGIC") = py::bytes(kTraceMagic, 8);
  m.def("replay_routing", &replay_routing, py::arg("ids"), py::arg("step_ends"), py::kw_only(),
        py::arg("experts"), py::arg("topk"), py::arg("slots") = 0,
        py::arg("layer_slots") = std::vector<int64_t>{}, py::arg("owned") = std::vector<int32_t>{},
        py::arg("policy") = "lru", py::arg("many_rows") = true);
  m.def("read_trace", &read_trace, py::arg("path"));
  py::class_<TraceWriter>(m, "TraceWriter")
      .def(py::init([](const std::string& path, std::vector<int32_t> layers, int32_t experts, int32_t topk,
                       uint64_t fingerprint) {
             TraceHeader header;
             header.experts = experts;
             header.topk = topk;
             header.fingerprint = fingerprint;
             header.layers = std::move(layers);
             return std::make_unique<TraceWriter>(path, std::move(header));
           }),
           py::arg("path"), py::kw_only(), py::arg("layers"), py::arg("experts"), py::arg("topk"),
           py::arg("fingerprint") = 0)
      .def("step", &write_step, py::arg("rows"), py::arg("ids"))
      .def("flush", &TraceWriter::flush)
      .def("close", &TraceWriter::close)
      .def_property_readonly("rows", &TraceWriter::rows);
}

}  // namespace rocket::bind
