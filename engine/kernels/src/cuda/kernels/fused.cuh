// The headers that generated kernels use (cuda/generate.rs).
#pragma once
#include "math.cuh"
#include "norm.cuh"
#include "random.cuh"
#include "slots.cuh"
#include "strides.cuh"
