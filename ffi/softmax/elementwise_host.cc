#include "softmax/elementwise.cu"
