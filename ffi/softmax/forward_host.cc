#include "softmax/forward.cu"
