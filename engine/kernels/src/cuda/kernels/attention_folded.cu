// The kernels of attention.cu for queries that are a rank's chunks of the keys' sequence (attention.cuh).
#define FOLDED
#include "attention.cu"
