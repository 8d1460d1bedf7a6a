// The CUDA language, from CUDA or from the host executor.
#pragma once

#ifdef JAX_GPUOPS_INTERPRET
#include "simt/cuda.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#endif
