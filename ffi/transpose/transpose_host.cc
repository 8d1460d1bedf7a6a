#include "transpose/transpose.cu"
