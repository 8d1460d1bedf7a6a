#include "reduce/reduce.cu"
