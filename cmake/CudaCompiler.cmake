# Enables the language CUDA if JAX_GPUOPS_CUDA asks for it, and sets cuda_enabled to ON or OFF.
# The compiler is the first of: CMAKE_CUDA_COMPILER or CUDACXX if set, nvcc from PyPI (a build
# requirement), nvcc on PATH. Also sets pypi_cuda_root, the folder of the packages from PyPI.

include(CheckLanguage)
find_in_python_package(pypi_cuda_root nvidia cu13)
set(cuda_enabled OFF)

if(NOT JAX_GPUOPS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "JAX_GPUOPS_CUDA is '${JAX_GPUOPS_CUDA}'; it must be AUTO, ON or OFF.")
endif()
if(NOT JAX_GPUOPS_CUDA OR JAX_GPUOPS_SANITIZE)
  return()
endif()

# AUTO continues without CUDA only if no compiler is specified.
if(JAX_GPUOPS_CUDA STREQUAL "AUTO" AND NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
  set(cuda_missing_severity WARNING)
else()
  set(cuda_missing_severity FATAL_ERROR)
endif()

if(NOT CMAKE_CUDA_COMPILER)
  if("$ENV{CUDACXX}" STREQUAL "" AND EXISTS "${pypi_cuda_root}/bin/nvcc")
    set(ENV{CUDACXX} "${pypi_cuda_root}/bin/nvcc")
    # The packages have their libraries in lib, but this nvcc looks in lib64.
    set(ENV{NVCC_APPEND_FLAGS} "-L\"${pypi_cuda_root}/lib\"")
  endif()
  unset(CMAKE_CUDA_COMPILER CACHE)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    if("$ENV{CUDACXX}" STREQUAL "")
      set(problem "no CUDA compiler was found")
      set(remedy "install the nvidia-* packages that pyproject.toml lists as build requirements")
    else()
      set(problem "the CUDA compiler $ENV{CUDACXX} does not work")
      set(remedy "set CUDACXX to an nvcc of CUDA 13, or unset it to use the one from PyPI")
    endif()
    message(${cuda_missing_severity}
      "The CUDA kernels cannot be built because ${problem}: ${remedy}, or build without CUDA by "
      "JAX_GPUOPS_CUDA=OFF.")
    return()
  endif()
endif()

# sm_80 code runs on 8.x, its PTX on any newer GPU; sm_90a code uses features of Hopper only.
set(CMAKE_CUDA_ARCHITECTURES "80;90a-real" CACHE STRING "GPU architectures of _cuda")
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(${cuda_missing_severity}
    "The CUDA kernels cannot be built because ${CMAKE_CUDA_COMPILER} is of CUDA "
    "${CMAKE_CUDA_COMPILER_VERSION}: set CUDACXX to an nvcc of CUDA 13 or newer, or build without "
    "CUDA by JAX_GPUOPS_CUDA=OFF.")
  return()
endif()
message(STATUS "CUDA kernels for ${CMAKE_CUDA_ARCHITECTURES} by ${CMAKE_CUDA_COMPILER}")
set(cuda_enabled ON)
