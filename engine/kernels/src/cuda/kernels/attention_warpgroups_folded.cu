// The kernels of attention_warpgroups.cu for queries that are a rank's chunks of the keys' sequence (attention.cuh).
#define FOLDED
#include "warpgroup.cuh"

#include "attention_warpgroups.cu"
