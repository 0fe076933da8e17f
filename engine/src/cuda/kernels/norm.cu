// Layer and root-mean-square normalisation of rows, and their gradients. Twins: ops/layer_norm.rs, ops/rms_norm.rs,
// ops/norm_grad.rs. Columns' sums over rows are taken in pieces of fixed size.
#include "norm.cuh"
#include "pieces.cuh"

KERNELS(layer_norm, NormArguments)
KERNELS(rms_norm, NormArguments)
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
