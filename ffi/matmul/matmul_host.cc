#include "matmul/matmul.cu"
