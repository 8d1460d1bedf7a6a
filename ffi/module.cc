// The Python module, compiled twice: as _cuda, whose targets run on the GPU, and as _interpret,
// whose targets run the same kernels on the host.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <variant>

#include "core/cuda.h"
#include "core/device.h"
#include "core/errors.h"
#include "core/record.h"
#include "core/registry.h"
#include "xla/ffi/api/c_api.h"

#ifdef JAX_GPUOPS_INTERPRET
#include "core/handler.h"
#include "simt/simt.h"
#endif

namespace JAX_GPUOPS_NAMESPACE {
namespace {

namespace nb = nanobind;

nb::dict registrations() {
  nb::dict targets;
  for (const Op& op : registry()) {
    for (const Target& target : op.targets) {
      nb::dict stages;
      stages["execute"] = nb::capsule(target.execute);
#ifndef JAX_GPUOPS_INTERPRET
      stages["initialize"] = nb::capsule(target.initialize);  // XLA:CPU has no such stage
#endif
      targets[nb::str(target.name.data(), target.name.size())] = stages;
    }
  }
  return targets;
}

const Op& find_op(std::string_view name) {
  for (const Op& op : registry()) {
    if (op.name == name) return op;
  }
  std::string known;
  for (const Op& op : registry()) {
    if (!op.algorithms.empty()) known += (known.empty() ? "" : ", ") + std::string(op.name);
  }
  throw std::invalid_argument("there is no op family '" + std::string(name) +
                              "'; there are: " + known);
}

std::vector<nb::dict> algorithms(std::string_view op) {
  std::vector<nb::dict> result;
  const auto text = [](std::string_view view) { return nb::str(view.data(), view.size()); };
  for (const AlgorithmInfo& algorithm : find_op(op).algorithms) {
    nb::dict entry;
    entry["name"] = text(algorithm.name);
    entry["summary"] = text(algorithm.summary);
    entry["source"] = text(algorithm.source);
    entry["limits"] = text(algorithm.limits);
    entry["kernels"] = text(algorithm.kernels);
    result.push_back(entry);
  }
  return result;
}

Fields to_fields(const nb::dict& problem) {
  Fields fields;
  for (auto [key, value] : problem) {
    const auto name = nb::cast<std::string>(key);
    if (nb::isinstance<nb::str>(value)) {
      fields.set(name, nb::cast<std::string>(value));
    } else if (nb::isinstance<nb::sequence>(value)) {
      fields.set(name, nb::cast<std::vector<std::int64_t>>(value));
    } else {
      fields.set(name, nb::cast<std::int64_t>(value));
    }
  }
  return fields;
}

nb::object to_python(const Fields::Value& value) {
  return std::visit([](const auto& each) { return nb::cast(each); }, value);
}

nb::dict to_python(const Fields& fields) {
  nb::dict result;
  for (const auto& [name, value] : fields) result[nb::cast(name)] = to_python(value);
  return result;
}

nb::dict plan(std::string_view op, const nb::dict& problem, [[maybe_unused]] int ordinal) {
#ifdef JAX_GPUOPS_INTERPRET
  const Device& machine = device(0);
#else
  const Device& machine = ordinal < 0 ? nominal_device() : device(ordinal);
#endif
  const PlanInfo info = find_op(op).plan(to_fields(problem), machine);
  nb::dict result;
  result["algorithm"] = nb::str(info.algorithm.data(), info.algorithm.size());
  result["reason"] = info.reason;
  result["config"] = to_python(info.config);
  return result;
}

// The executions since start_recording(), each a dict.
std::vector<nb::dict> recorded() {
  std::vector<nb::dict> result;
  for (const Execution& execution : stop_recording()) {
    nb::dict entry;
    entry["op"] = nb::cast(execution.op);
    entry["problem"] = to_python(execution.problem);
    entry["algorithm"] = nb::cast(execution.algorithm);
    entry["config"] = to_python(execution.config);
    entry["kernels"] = nb::cast(execution.kernels);
    result.push_back(entry);
  }
  return result;
}

std::int64_t workspace(std::string_view op, const nb::dict& problem) {
  return find_op(op).workspace(to_fields(problem));
}

nb::dict build_info() {
  nb::dict info;
  info["version"] = JAX_GPUOPS_VERSION;
  info["ffi_api_version"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef JAX_GPUOPS_INTERPRET
  info["platform"] = "cpu";
#ifdef __SANITIZE_ADDRESS__
  info["sanitized"] = true;
#else
  info["sanitized"] = false;
#endif
#else
  info["platform"] = "CUDA";
  info["cuda_version"] = nb::make_tuple(CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  info["cuda_architectures"] = JAX_GPUOPS_CUDA_ARCHITECTURES;
#endif
  return info;
}

#ifndef JAX_GPUOPS_INTERPRET
nb::tuple driver_version() {
  int version = 0;  // stays 0 where no driver is installed
  check_cuda(cudaDriverGetVersion(&version), "reading the version of the driver");
  return nb::make_tuple(version / 1000, version % 1000 / 10);
}
#endif

}  // namespace
}  // namespace JAX_GPUOPS_NAMESPACE

#ifdef JAX_GPUOPS_INTERPRET
#define JAX_GPUOPS_MODULE _interpret
#else
#define JAX_GPUOPS_MODULE _cuda
#endif

NB_MODULE(JAX_GPUOPS_MODULE, m) {
  namespace ours = JAX_GPUOPS_NAMESPACE;
  namespace nb = nanobind;
  m.doc() = "FFI targets of jax_gpuops and what they can do.";
  m.def("registrations", &ours::registrations,
        "FFI targets by name, each a dict of stage to capsule, for jax.ffi.register_ffi_target.");
  m.def("algorithms", &ours::algorithms, nb::arg("op"),
        "The op's algorithms: dicts with name, summary, source, limits and kernels.");
  m.def(
      "plan", &ours::plan, nb::arg("op"), nb::arg("problem"), nb::arg("ordinal") = -1,
      "What would run on the CUDA device with this ordinal, or on an H200: a dict with algorithm, "
      "reason and config. ValueError if the algorithm that the problem names cannot take it.");
  m.def("workspace", &ours::workspace, nb::arg("op"), nb::arg("problem"),
        "Bytes of workspace that one row of the problem needs at most.");
  m.def("start_recording", &ours::start_recording, "Begins to record what handlers launch.");
  m.def("stop_recording", &ours::recorded,
        "Ends it, and returns the executions: dicts with op, problem, algorithm, config and the "
        "names of the kernels that were launched.");
  m.def("build_info", &ours::build_info, "Versions and architectures this module was built with.");
#ifndef JAX_GPUOPS_INTERPRET
  m.def("driver_version", &ours::driver_version,
        "The newest CUDA version the installed driver supports, (0, 0) without a driver.");
#else
  m.def(
      "set_buffer_offset", [](std::size_t bytes) { ours::buffer_offset = bytes; }, nb::arg("bytes"),
      "Makes buffers begin so many bytes after where XLA put them, a multiple of 16: 0 is there.");
  m.def("set_schedule_seed", &ours::simt::set_schedule_seed, nb::arg("seed"),
        "Sets the order in which blocks and threads run, 0 is ascending, others are shuffled, and "
        "when copies beside the threads take place: late for 0, 3, 6 ..., early for 1, 4, 7 ..., "
        "else at any time.");
  m.def("set_held_back", &ours::simt::set_held_back, nb::arg("warp") = -1, nb::arg("block") = -1,
        "Has a warp of every block, or one of the blocks that run together, run only when no other "
        "can; -1 is none.");
#endif
}
