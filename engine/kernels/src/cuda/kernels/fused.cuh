// What generated kernels are made of (cuda/generate.rs).
#pragma once
#include "math.cuh"
#include "norm.cuh"
#include "random.cuh"
#include "slots.cuh"
#include "strides.cuh"
