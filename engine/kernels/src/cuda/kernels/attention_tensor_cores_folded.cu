// The kernels of attention_tensor_cores.cu for queries that are a rank's chunks of the keys' sequence (attention.cuh).
#define FOLDED
#include "attention_tensor_cores.cu"
