// Rows normalised, and their gradient: a block has one row, and a thread every blockDim.x-th element of it.
#pragma once
#include "reduce.cuh"

struct NormArguments {
    const void* x;
    const void* weight;
    const void* bias;
    void* y;
    f32* stats;
    u64 width;
    f32 eps;
};

// y = (x - mean)·rstd·weight + bias, and (mean, rstd) of the row.
template <typename T>
__device__ void layer_norm(const NormArguments& to) {
    f32* scratch = (f32*)shared_memory;
    const T *x = (const T*)to.x + blockIdx.x * to.width, *weight = (const T*)to.weight, *bias = (const T*)to.bias;
    T* y = (T*)to.y + blockIdx.x * to.width;
    f32 sum = 0.0f;
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) sum += load(x + i);
    const f32 mean = sum_block(sum, scratch) / f32(to.width);
    f32 squares = 0.0f;
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        const f32 centred = load(x + i) - mean;
        squares += centred * centred;
    }
    const f32 rstd = 1.0f / sqrtf(sum_block(squares, scratch) / f32(to.width) + to.eps);
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        store(y + i, (load(x + i) - mean) * rstd * load(weight + i) + load(bias + i));
    }
    if (threadIdx.x == 0) {
        to.stats[2 * u64(blockIdx.x)] = mean;
        to.stats[2 * u64(blockIdx.x) + 1] = rstd;
    }
}

// y = x·rstd·weight, and (0, rstd) of the row.
template <typename T>
__device__ void rms_norm(const NormArguments& to) {
    f32* scratch = (f32*)shared_memory;
    const T *x = (const T*)to.x + blockIdx.x * to.width, *weight = (const T*)to.weight;
    T* y = (T*)to.y + blockIdx.x * to.width;
    f32 squares = 0.0f;
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) squares += load(x + i) * load(x + i);
    const f32 rstd = 1.0f / sqrtf(sum_block(squares, scratch) / f32(to.width) + to.eps);
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) store(y + i, load(x + i) * rstd * load(weight + i));
    if (threadIdx.x == 0) {
        to.stats[2 * u64(blockIdx.x)] = 0.0f;
        to.stats[2 * u64(blockIdx.x) + 1] = rstd;
    }
}

struct NormGradInputArguments {
    const void* x;
    const void* weight;
    const f32* stats;
    const void* dy;
    void* dx;
    u64 width;
    u32 is_centred;
};

// dx = rstd·(g - mean(g) - x̂·mean(g·x̂)) with g = dy·weight, each to put(its index, dx). What is put may lie over x or dy: a
// thread puts an element behind its own last look at it, and nobody else looks at it then.
template <typename T, typename Put>
__device__ void norm_grad_input_to(const NormGradInputArguments& to, Put put) {
    f32* scratch = (f32*)shared_memory;
    const u64 row = blockIdx.x;
    const T *x = (const T*)to.x + row * to.width, *weight = (const T*)to.weight, *dy = (const T*)to.dy + row * to.width;
    const f32 mean = to.stats[2 * row], rstd = to.stats[2 * row + 1];
    f32 sum_g = 0.0f, sum_gx = 0.0f;
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        const f32 g = load(dy + i) * load(weight + i);
        sum_g += g;
        sum_gx += g * (load(x + i) - mean);
    }
    const f32 mean_g = to.is_centred ? sum_block(sum_g, scratch) / f32(to.width) : 0.0f;
    const f32 mean_gx = sum_block(sum_gx, scratch) * rstd / f32(to.width);
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        const f32 g = load(dy + i) * load(weight + i);
        put(row * to.width + i, rstd * (g - mean_g - (load(x + i) - mean) * rstd * mean_gx));
    }
}

template <typename T>
__device__ void norm_grad_input(const NormGradInputArguments& to) {
    norm_grad_input_to<T>(to, [&](u64 i, f32 dx) { store((T*)to.dx + i, dx); });
}
