#include "softmax/tangent.cu"
