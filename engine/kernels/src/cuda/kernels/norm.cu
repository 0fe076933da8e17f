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
    const T *x = (const T*)to.x, *dy = (const T*)to.dy;
    own_columns(to.width, is_aligned(x) && is_aligned(dy), [&](auto count, u64 column) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 weight[N] = {}, bias[N] = {};
        for (u64 row = to.pieces.first(blockIdx.x); row < to.pieces.end(blockIdx.x); ++row) {
            f32 of_x[N], d[N];
            load_neighbours(of_x, x + row * to.width + column);
            load_neighbours(d, dy + row * to.width + column);
            const f32 mean = to.stats[2 * row], rstd = to.stats[2 * row + 1];
            for (u32 j = 0; j < N; ++j) {
                weight[j] += d[j] * (of_x[j] - mean) * rstd;
                bias[j] += d[j];
            }
        }
        store_neighbours(to.parts + blockIdx.x * to.width + column, weight);
        store_neighbours(to.parts + (u64(gridDim.x) + blockIdx.x) * to.width + column, bias);
    });
}
KERNELS(norm_grad_weight, NormGradWeightArguments)
