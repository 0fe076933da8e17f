// Unary functions and their derivatives, with the same formulas as on the CPU (ops/unary.rs).
#pragma once
#include "base.cuh"

// Constants of GELU's tanh form: sqrt(2/pi), and the coefficient of x^3.
constexpr f32 GELU_SCALE = 0.7978845608028654f;
constexpr f32 GELU_CUBE = 0.044715f;

// Computes 2^x with the instruction `ex2`, which is accurate to 2 units in the last place (PTX ISA). Subnormal results
// become zero.
__device__ __forceinline__ f32 exp2_of(f32 x) {
#ifdef ON_HOST
    return exp2f(x);
#else
    f32 power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

// Computes the base-2 logarithm with the instruction `lg2`, which is accurate to 2⁻²² (PTX ISA). The result is minus
// infinity for zero and for subnormal numbers.
__device__ __forceinline__ f32 log2_of(f32 x) {
#ifdef ON_HOST
    return log2f(x);
#else
    f32 logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
    return logarithm;
#endif
}

// Computes e^x with exp2_of. The error is that of `ex2` and, for large x, the rounding error of the product.
__device__ __forceinline__ f32 exp_of(f32 x) { return exp2_of(x * 1.4426950408889634f); }

__device__ __forceinline__ f32 sigmoid(f32 x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ f32 silu(f32 x) { return x * sigmoid(x); }

__device__ __forceinline__ f32 silu_derivative(f32 x) {
    const f32 s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// GELU in its tanh form: x(1 + tanh u)/2 = x·sigmoid(2u).
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

// Defines the functions of ops/unary.rs and their gradients under their names.
#define FUNCTION(name, value, derivative)                                  \
    __device__ __forceinline__ f32 of_##name(f32 x) { return value; }      \
    __device__ __forceinline__ f32 of_##name##_grad(f32 x, f32 dy) { return derivative; }

FUNCTION(exp, expf(x), dy * expf(x))
FUNCTION(log, logf(x), dy / x)
FUNCTION(sqr, x * x, dy * 2.0f * x)
FUNCTION(sqrt, sqrtf(x), dy * 0.5f / sqrtf(x))
FUNCTION(recip, 1.0f / x, -dy / (x * x))
FUNCTION(abs, fabsf(x), x == 0.0f ? 0.0f : (x > 0.0f ? dy : -dy))
FUNCTION(sin, sinf(x), dy * cosf(x))
FUNCTION(cos, cosf(x), -dy * sinf(x))
FUNCTION(erf, erff(x), dy * 1.1283791670955126f * expf(-x * x))
FUNCTION(tanh, tanhf(x), dy * (1.0f - tanhf(x) * tanhf(x)))
FUNCTION(sigmoid, sigmoid(x), dy * sigmoid(x) * (1.0f - sigmoid(x)))
FUNCTION(relu, fmaxf(x, 0.0f), x > 0.0f ? dy : 0.0f)
FUNCTION(silu, silu(x), dy * silu_derivative(x))
FUNCTION(gelu, gelu(x), dy * gelu_derivative(x))
FUNCTION(gelu_erf, gelu_erf(x), dy * gelu_erf_derivative(x))
