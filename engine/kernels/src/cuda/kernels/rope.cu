// Rotary position embedding. CPU counterpart: ops/rope.rs. The first kernel computes a table of cosines and sines, in
// f64 because positions may be large. The second kernel rotates every pair of elements by the pair's entry of the
// table.
#include "rows.cuh"
#include "strides.cuh"

// Same layout as RopeFrequencies in launch/rope.rs, which documents the formula.
struct RopeFrequencies {
    f64 theta;
    f64 factor;
    f64 per_turn;
    f64 per_number;
    f64 offset;
    f64 amplitude;

    __device__ f64 at(u64 number, u64 head_size) const {
        const f64 frequency = pow(theta, -2.0 * f64(number) / f64(head_size));
        const f64 kept = fmin(fmax(per_turn * frequency + per_number * f64(number) + offset, 0.0), 1.0);
        return frequency * (kept + (1.0 - kept) / factor);
    }
};

struct RopeArguments {
    const void* x;
    void* y;
    // [tokens][cosines of half a head, then sines]
    f32* table;
    // For each token of the table, its position. Null if the tokens are the first ones of a sequence.
    const u32* positions;
    u64 tokens;
    u64 heads;
    u64 head_size;
    // Total number of pairs.
    u64 pairs;
    Strides at_x;
    RopeFrequencies frequencies;
    // True if a pair consists of adjacent elements. False if it consists of an element of the head's first half and
    // the corresponding one of the second half.
    u32 are_neighbours;
    u32 is_inverse;
    // True if whole packs of both halves of a head can be moved. Then there are fewer than 2^32 elements.
    u32 is_packed;
};

KERNEL(rope_table, RopeArguments) {
    const u64 half = arguments.head_size / 2, index = global_thread();
    if (index >= arguments.tokens * half) return;
    const u64 token = index / half, frequency = index % half;
    const f64 place = f64(arguments.positions ? arguments.positions[token] : token);
    const f64 angle = place * arguments.frequencies.at(frequency, arguments.head_size);
    const f64 amplitude = arguments.frequencies.amplitude;
    f32* row = arguments.table + token * arguments.head_size;
    row[frequency] = f32(amplitude * cos(angle));
    row[half + frequency] = f32(arguments.is_inverse ? -amplitude * sin(angle) : amplitude * sin(angle));
}

// Rotates a pack of pairs of halves.
template <typename T>
__device__ __forceinline__ void rope_pack(const RopeArguments& to) {
    constexpr u32 PACK = Pack<T>::SIZE;
    const u32 size = u32(to.head_size), half = size / 2, packs = half / PACK, index = u32(global_thread());
    if (index >= u32(to.pairs) / PACK) return;
    const u32 head = index / packs, number = index % packs * PACK, token = head / u32(to.heads) % u32(to.tokens);
    const u32 first = head * size + number;
    const T* x = (const T*)to.x + to.at_x.at(first);
    T* y = (T*)to.y + first;
    const f32* row = to.table + u64(token) * size + number;
    f32 a[PACK], b[PACK], c[PACK], s[PACK];
    load_neighbours(a, x);
    load_neighbours(b, x + half);
    load_neighbours(c, row);
    load_neighbours(s, row + half);
#pragma unroll
    for (u32 j = 0; j < PACK; ++j) {
        const f32 low = a[j] * c[j] - b[j] * s[j];
        b[j] = b[j] * c[j] + a[j] * s[j];
        a[j] = low;
    }
    store_neighbours(y, a);
    store_neighbours(y + half, b);
}

// A thread rotates one pair or one pack of pairs, so y may overwrite x.
template <typename T>
__device__ void rope(const RopeArguments& to) {
    if (to.is_packed) return rope_pack<T>(to);
    const u64 half = to.head_size / 2, index = global_thread();
    if (index >= to.pairs) return;
    const u64 head = index / half, frequency = index % half, token = head / to.heads % to.tokens;
    const u64 first = head * to.head_size + (to.are_neighbours ? 2 * frequency : frequency);
    const u64 second = first + (to.are_neighbours ? 1 : half);
    const f32* row = to.table + token * to.head_size;
    const f32 c = row[frequency], s = row[half + frequency];
    const f32 a = load((const T*)to.x + to.at_x.at(first)), b = load((const T*)to.x + to.at_x.at(second));
    store((T*)to.y + first, a * c - b * s);
    store((T*)to.y + second, b * c + a * s);
}
KERNELS(rope, RopeArguments)
