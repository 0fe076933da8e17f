// Functions of one number, and their derivatives, as the CPU has them (ops/unary.rs).
#pragma once
#include "base.cuh"

// sqrt(2/pi) and the cube's factor of GELU's tanh form.
constexpr f32 GELU_SCALE = 0.7978845608028654f;
constexpr f32 GELU_CUBE = 0.044715f;

__device__ __forceinline__ f32 sigmoid(f32 x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ f32 silu(f32 x) { return x * sigmoid(x); }

__device__ __forceinline__ f32 silu_derivative(f32 x) {
    const f32 s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// x(1 + tanh u)/2 = x·sigmoid(2u).
__device__ __forceinline__ f32 gelu(f32 x) { return x * sigmoid(2.0f * GELU_SCALE * x * (1.0f + GELU_CUBE * x * x)); }

__device__ __forceinline__ f32 gelu_derivative(f32 x) {
    const f32 scale = 2.0f * GELU_SCALE;
    const f32 s = sigmoid(scale * x * (1.0f + GELU_CUBE * x * x));
    return s + x * s * (1.0f - s) * scale * (1.0f + 3.0f * GELU_CUBE * x * x);
}

__device__ __forceinline__ f32 gelu_erf(f32 x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }

__device__ __forceinline__ f32 gelu_erf_derivative(f32 x) {
    const f32 density = expf(-0.5f * x * x) * 0.3989422804014327f;
    return 0.5f * (1.0f + erff(x * 0.7071067811865476f)) + x * density;
}
