#include "selftest/selftest.cu"
