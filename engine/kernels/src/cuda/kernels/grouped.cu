// The experts' products in f32.
#include "grouped.cuh"

// The sums of one block: a tile of 64 × 64, of which each thread computes 4 × 4.
template <bool ALONG_A, bool ALONG_B>
struct PlainProducts {
    using Number = f32;
    static constexpr u32 TILE = 64;
    static constexpr u32 DEPTH = 16;
    // In shared memory, the elements at one index of the summed dimension are contiguous. The pitch is the tile's
    // width plus 4, for alignment to packs of four.
    static constexpr u32 PITCH = TILE + 4;

    f32 sums[4][4] = {};

    template <typename F>
    __device__ __forceinline__ void visit(F f) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) sums[i][j] = f(threadIdx.x / 16 * 4 + i, threadIdx.x % 16 * 4 + j, sums[i][j]);
        }
    }

    template <bool ALONG>
    __device__ __forceinline__ static void load_tile(f32* to, const Factor<f32, ALONG>& of, const Range& range) {
        for (u32 i = threadIdx.x; i < TILE * DEPTH; i += GROUPED_THREADS) {
            const u32 d = ALONG ? i % DEPTH : i / TILE, t = ALONG ? i / DEPTH : i % TILE;
            const u32 at = range.first + d, own = of.first + t;
            const bool is_there = at < range.end && own < of.end;
            to[d * PITCH + t] = is_there ? of.at[ALONG ? u64(own) * of.pitch + at : u64(at) * of.pitch + own] : 0.0f;
        }
    }

    template <typename Ranges>
    __device__ __forceinline__ void add(const Factor<f32, ALONG_A>& a, const Factor<f32, ALONG_B>& b, Ranges ranges) {
        f32 *tile_a = (f32*)shared_memory, *tile_b = tile_a + DEPTH * PITCH;
        Range range;
        while (ranges.take(range)) {
            __syncthreads(); // The previous tiles have been read.
            load_tile(tile_a, a, range);
            load_tile(tile_b, b, range);
            __syncthreads();
            f32 part[4][4] = {};
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d) {
                const auto of_a = *(const Pack<f32>*)(tile_a + d * PITCH + threadIdx.x / 16 * 4);
                const auto of_b = *(const Pack<f32>*)(tile_b + d * PITCH + threadIdx.x % 16 * 4);
                for (u32 i = 0; i < 4; ++i) {
                    for (u32 j = 0; j < 4; ++j) part[i][j] += of_a.at[i] * of_b.at[j];
                }
            }
            for (u32 i = 0; i < 4; ++i) {
                for (u32 j = 0; j < 4; ++j) sums[i][j] += part[i][j];
            }
        }
    }
};
GROUPED_KERNELS(f32, PlainProducts)
