// What the tests of the host executor share.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "simt/fiber.h"
#include "simt/simt.h"

namespace JAX_GPUOPS_NAMESPACE {

inline std::atomic<int> passed{0};
inline std::atomic<int> failed{0};

#define CHECK(...)                                                          \
  do {                                                                      \
    if (__VA_ARGS__) {                                                      \
      ++passed;                                                             \
    } else {                                                                \
      ++failed;                                                             \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
    }                                                                       \
  } while (false)

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// What the launch throws as simt::Error; empty if nothing.
inline std::string error_of(const simt::Configuration& configuration,
                            const std::function<void()>& body) {
  try {
    simt::launch(configuration, body);
  } catch (const simt::Error& error) {
    return error.what();
  }
  return "";
}

inline std::string error_of(dim3 grid, dim3 block, std::size_t shared_bytes,
                            const std::function<void()>& body) {
  return error_of(simt::Configuration{grid, block, shared_bytes}, body);
}

inline std::string error_of(unsigned threads, const std::function<void()>& body) {
  return error_of(1, threads, 0, body);
}

inline void check_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    const bool found = contains(text, part);
    CHECK(found);
    if (!found) std::printf("  no '%s' in '%s'\n", part.c_str(), text.c_str());
  }
}

// Restores ascending order at the end of a test.
struct Seed {
  explicit Seed(std::uint64_t seed) { simt::set_schedule_seed(seed); }
  ~Seed() { simt::set_schedule_seed(0); }
};

#ifdef JAX_GPUOPS_ASAN
// What AddressSanitizer says of the work in a child process.
inline std::string asan_report(const std::function<void()>& work) {
  int ends[2];
  if (pipe(ends) != 0) return "pipe failed";
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    work();
    _exit(0);
  }
  close(ends[1]);
  std::string report;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    report.append(buffer, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) report += "the child did not fail";
  return report;
}
#endif

// In arithmetic_test.cc.
void test_arithmetic();
// In async_test.cc.
void test_async();
// In tensor_test.cc.
void test_tensor();

}  // namespace JAX_GPUOPS_NAMESPACE
