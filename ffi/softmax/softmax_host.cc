#include "softmax/softmax.cu"
