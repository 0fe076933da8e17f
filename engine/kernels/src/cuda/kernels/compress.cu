// Compression of activations to eight bits, and its inverse. CPU counterpart: ops/compress.rs, which documents the method.
#include "rows.cuh"

struct CompressArguments {
    // Read by compress, written by expand.
    void* x;
    u8* codes;
    // The smallest element and the step of each group.
    f32* ranges;
    u64 groups;
    // Number of elements of a row, and of a group. The last group of a row may have fewer.
    u64 row;
    u64 group;

    // The first element of a group.
    __device__ __forceinline__ u64 first(u64 index) const {
        const u64 of_row = (row + group - 1) / group;
        return index / of_row * row + index % of_row * group;
    }

    __device__ __forceinline__ u32 count(u64 index) const {
        const u64 of_row = (row + group - 1) / group;
        return u32(smaller(group, row - index % of_row * group));
    }
};

// Neighbouring elements that a lane of the group's warp processes: 256 elements per group.
constexpr u32 OWN = 8;

// A step smaller than this is replaced by zero, so that the reciprocal of every other step is finite.
constexpr f32 LEAST_STEP = 1e-37f;

// True if the elements of all groups start at whole packs of OWN elements.
template <typename T>
__device__ __forceinline__ bool are_packed(const CompressArguments& to) {
    return to.row % to.group == 0 && to.group % OWN == 0 && is_aligned(to.x) && (reinterpret_cast<u64>(to.codes) & 7) == 0;
}

// A warp compresses a group.
template <typename T>
__device__ void compress(const CompressArguments& to) {
    const u64 group = global_thread() / 32;
    if (group >= to.groups) return;
    const u64 first = to.first(group);
    const u32 count = to.count(group), own = lane_of() * OWN;
    const T* x = (const T*)to.x + first;
    const bool is_packed = are_packed<T>(to);
    f32 all[OWN];
    unpack(all, is_packed ? neighbours_in<true, OWN>(x, own, count) : neighbours_in<false, OWN>(x, own, count));
    f32 least = -minus_infinity(), greatest = minus_infinity();
#pragma unroll
    for (u32 j = 0; j < OWN; ++j) {
        if (own + j < count) {
            least = fminf(least, all[j]);
            greatest = fmaxf(greatest, all[j]);
        }
    }
    least = -fold_lanes<Max>(-least, 32);
    greatest = fold_lanes<Max>(greatest, 32);
    const f32 range = (greatest - least) / 255.0f, step = range >= LEAST_STEP ? range : 0.0f;
    const f32 per_step = step > 0.0f ? 1.0f / step : 0.0f;
#pragma unroll
    for (u32 j = 0; j < OWN; ++j) {
        // Codes are at most 255.5 before they are truncated, apart from rounding. If the range is infinite, the step
        // says so, and the elements come back as NaN or infinite.
        const f32 code = (all[j] - least) * per_step + 0.5f;
        all[j] = code >= 0.0f && code < 256.0f ? f32(u32(code)) : 0.0f;
    }
    u8* codes = to.codes + first + own;
    if (is_packed && own < count) {
        store_neighbours(codes, all);
    } else {
        for (u32 j = 0; j < OWN && own + j < count; ++j) store(codes + j, all[j]);
    }
    if (lane_of() == 0) {
        to.ranges[2 * group] = least;
        to.ranges[2 * group + 1] = step;
    }
}
KERNELS(compress, CompressArguments)

// A warp restores a group.
template <typename T>
__device__ void expand(const CompressArguments& to) {
    const u64 group = global_thread() / 32;
    if (group >= to.groups) return;
    const u64 first = to.first(group);
    const u32 count = to.count(group), own = lane_of() * OWN;
    const f32 least = to.ranges[2 * group], step = to.ranges[2 * group + 1];
    const u8* codes = to.codes + first;
    T* x = (T*)to.x + first + own;
    if (are_packed<T>(to)) {
        if (own >= count) return;
        f32 all[OWN];
        unpack(all, neighbours<OWN>(codes + own));
#pragma unroll
        for (u32 j = 0; j < OWN; ++j) all[j] = all[j] * step + least;
        store_neighbours(x, all);
        return;
    }
    for (u32 j = 0; j < OWN && own + j < count; ++j) store(x + j, load(codes + own + j) * step + least);
}
KERNELS(expand, CompressArguments)
