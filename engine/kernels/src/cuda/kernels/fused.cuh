// What generated kernels are made of (cuda/fused/source.rs).
#pragma once
#include "math.cuh"
#include "norm.cuh"
#include "random.cuh"
#include "strides.cuh"
