#include "core/record.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace JAX_GPUOPS_NAMESPACE {
namespace {

std::atomic<bool> recording{false};

struct Log {
  std::mutex mutex;
  std::vector<Execution> executions;
};

Log& log() {
  static auto& instance = *new Log;  // never freed: handlers may run during exit
  return instance;
}

}  // namespace

bool is_recording() { return recording.load(std::memory_order_relaxed); }

void start_recording() {
  std::lock_guard lock(log().mutex);
  log().executions.clear();
  recording = true;
}

std::vector<Execution> stop_recording() {
  std::lock_guard lock(log().mutex);
  recording = false;
  return std::exchange(log().executions, {});
}

void record(Execution execution) {
  std::lock_guard lock(log().mutex);
  log().executions.push_back(std::move(execution));
}

}  // namespace JAX_GPUOPS_NAMESPACE
