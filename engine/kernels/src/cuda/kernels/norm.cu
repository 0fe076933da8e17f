// Layer and RMS normalization of rows, and their gradients. CPU counterparts: ops/layer_norm.rs,
// ops/rms_norm.rs, ops/norm_grad.rs. Sums of columns over rows are computed in pieces of fixed size.
#include "norm.cuh"

KERNELS(layer_norm, NormArguments)
KERNELS(rms_norm, NormArguments)
KERNELS(norm_grad_input, NormGradInputArguments)

struct NormGradWeightArguments {
    const void* x;
    const f32* stats;
    const void* dy;
    // The results are the sums of dy·x̂, and then those of dy.
    Fold fold;
};

// Sums one piece of rows, in the columns of this block.
template <typename T>
__device__ void norm_grad_weight(const NormGradWeightArguments& to) {
    const T *x = (const T*)to.x, *dy = (const T*)to.dy;
    const Fold& fold = to.fold;
    const u32 piece = blockIdx.x;
    const auto own = [&](auto f) { own_columns(fold.width, is_aligned(x) && is_aligned(dy), f); };
    own([&](auto count, u64 column) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 weight[N] = {}, bias[N] = {};
        const u64 end = fold.pieces.end(piece);
        for (u64 share = fold.pieces.first(piece); share < end; share += fold.pieces.share) {
            f32 of_weight[N] = {}, of_bias[N] = {};
            for (u64 row = share; row < smaller(share + fold.pieces.share, end); ++row) {
                f32 of_x[N], d[N];
                load_neighbours(of_x, x + row * fold.width + column);
                load_neighbours(d, dy + row * fold.width + column);
                add_to_gradients(of_weight, of_bias, of_x, d, to.stats[2 * row], to.stats[2 * row + 1]);
            }
            for (u32 j = 0; j < N; ++j) {
                weight[j] += of_weight[j];
                bias[j] += of_bias[j];
            }
        }
        store_neighbours(fold.part(0, piece) + column, weight);
        store_neighbours(fold.part(1, piece) + column, bias);
    });
    fold.finish<T>(piece, blockIdx.y, own);
}
KERNELS(norm_grad_weight, NormGradWeightArguments)
