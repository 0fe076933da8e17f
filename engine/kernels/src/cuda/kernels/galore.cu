// The projection of GaLore. CPU counterpart: optim/subspace.rs. Products and Adam's moments are launches of their own.
#include "random.cuh"
#include "reduce.cuh"

struct GaLoreArguments {
    // Scratch [rank, longer]: the projection's random start.
    f32* start;
    // Scratch [rank, width]: the rows that become the projection.
    const f32* from;
    // The projection [rank, width], whose rows are orthonormal.
    f32* projection;
    // Scratch of one value per row.
    f32* coefficients;
    const f32* norm;
    // Whether the projection is recomputed in this step: 1 or 0.
    const f32* refresh;
    u64 rank;
    u64 width;
    u64 longer;
    // The key of the random numbers.
    u64 key;
};

// If the norm is not finite, the step is skipped and the model does not change.
__device__ __forceinline__ bool is_refreshed(const GaLoreArguments& to) {
    return *to.refresh != 0.0f && *to.norm - *to.norm == 0.0f;
}

// Fills the start with random numbers. Steps that keep the projection fill it with zeros.
KERNEL(galore_start, GaLoreArguments) {
    const u64 i = global_thread();
    if (i >= arguments.rank * arguments.longer) return;
    arguments.start[i] = is_refreshed(arguments) ? Numbers{arguments.key, 0}.normal(i) : 0.0f;
}

// Fractions and magnitudes below which a row is stored as zeros.
constexpr f32 DEPENDENT = 1e-5f;
constexpr f32 VANISHED = 1e-37f;

// Makes the rows orthonormal, one after the other, by classical Gram-Schmidt, which runs twice on each row. Uses one
// block, because each row depends on all earlier ones. Steps that keep the projection return at once.
KERNEL(galore_orthonormalise, GaLoreArguments) {
    if (!is_refreshed(arguments)) return;
    f32* scratch = (f32*)shared_memory;
    const u64 width = arguments.width;
    const u32 warps = blockDim.x / 32;
    const auto each = [&](auto f) {
        for (u64 j = threadIdx.x; j < width; j += blockDim.x) f(j);
    };
    for (u64 index = 0; index < arguments.rank; ++index) {
        const f32* from = arguments.from + index * width;
        f32* row = arguments.projection + index * width;
        // The row is scaled first, because the squares of small gradients would underflow.
        f32 most = 0.0f, before = 0.0f, after = 0.0f;
        each([&](u64 j) { most = fmaxf(most, fabsf(from[j])); });
        most = max_block(most, scratch);
        if (most < VANISHED) {
            each([&](u64 j) { row[j] = 0.0f; });
            continue;
        }
        each([&](u64 j) {
            row[j] = from[j] / most;
            before += row[j] * row[j];
        });
        before = sqrtf(sum_block(before, scratch));
        for (u32 round = 0; round < 2; ++round) {
            __syncthreads(); // All of the row is stored.
            for (u64 other = warp_of(); other < index; other += warps) {
                f32 product = 0.0f;
                for (u64 j = lane_of(); j < width; j += 32) product += arguments.projection[other * width + j] * row[j];
                product = fold_lanes<Sum>(product, 32);
                if (lane_of() == 0) arguments.coefficients[other] = product;
            }
            __syncthreads();
            each([&](u64 j) {
                f32 x = row[j];
                for (u64 other = 0; other < index; ++other) {
                    x -= arguments.coefficients[other] * arguments.projection[other * width + j];
                }
                row[j] = x;
            });
        }
        each([&](u64 j) { after += row[j] * row[j]; });
        after = sqrtf(sum_block(after, scratch));
        const f32 factor = after > DEPENDENT * before ? 1.0f / after : 0.0f;
        each([&](u64 j) { row[j] *= factor; });
        __syncthreads(); // Later rows read this one.
    }
}
