// Layer and root-mean-square normalisation of rows, and their gradients. Twins: ops/layer_norm.rs, ops/rms_norm.rs,
// ops/norm_grad.rs. A block has one row; columns' sums over rows are taken in pieces of fixed size.
#include "pieces.cuh"
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
KERNELS(layer_norm, NormArguments)

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
KERNELS(rms_norm, NormArguments)

struct NormGradInputArguments {
    const void* x;
    const void* weight;
    const f32* stats;
    const void* dy;
    void* dx;
    u64 width;
    u32 is_centred;
};

// dx = rstd·(g - mean(g) - x̂·mean(g·x̂)) with g = dy·weight. dx may lie over dy: a thread overwrites what it alone reads.
template <typename T>
__device__ void norm_grad_input(const NormGradInputArguments& to) {
    f32* scratch = (f32*)shared_memory;
    const u64 row = blockIdx.x;
    const T *x = (const T*)to.x + row * to.width, *weight = (const T*)to.weight, *dy = (const T*)to.dy + row * to.width;
    T* dx = (T*)to.dx + row * to.width;
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
        store(dx + i, rstd * (g - mean_g - (load(x + i) - mean) * rstd * mean_gx));
    }
}
KERNELS(norm_grad_input, NormGradInputArguments)

struct NormGradWeightArguments {
    const void* x;
    const f32* stats;
    const void* dy;
    // [2][pieces][width]: sums of dy·x̂, then of dy.
    f32* parts;
    u64 width;
    Pieces pieces;
};

// The sums of one piece of rows, for the columns of this block.
template <typename T>
__device__ void norm_grad_weight(const NormGradWeightArguments& to) {
    const u64 column = u64(blockIdx.y) * blockDim.x + threadIdx.x;
    if (column >= to.width) return;
    const T *x = (const T*)to.x, *dy = (const T*)to.dy;
    f32 weight = 0.0f, bias = 0.0f;
    for (u64 row = to.pieces.first(blockIdx.x); row < to.pieces.end(blockIdx.x); ++row) {
        const f32 d = load(dy + row * to.width + column);
        weight += d * (load(x + row * to.width + column) - to.stats[2 * row]) * to.stats[2 * row + 1];
        bias += d;
    }
    to.parts[blockIdx.x * to.width + column] = weight;
    to.parts[(u64(gridDim.x) + blockIdx.x) * to.width + column] = bias;
}
KERNELS(norm_grad_weight, NormGradWeightArguments)
