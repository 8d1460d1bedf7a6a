#include "softmax/ladder.cu"
