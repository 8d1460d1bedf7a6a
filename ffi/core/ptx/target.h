// Shared by the headers of this folder.
//
// Each of their functions has its PTX and, beside it, what the host executor runs instead.
#pragma once

#include "core/cuda.h"

namespace JAX_GPUOPS_NAMESPACE {

#ifdef JAX_GPUOPS_INTERPRET
using Site = simt::Site;
#else
// Where in the source a function was called: the executor names it in errors, a GPU does not.
struct Site {
  __host__ __device__ static constexpr Site here() { return {}; }
};
#endif

}  // namespace JAX_GPUOPS_NAMESPACE
