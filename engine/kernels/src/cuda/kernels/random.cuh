// Stateless random numbers with the same bits as those of random.rs: number i of a sequence is a hash of key + i·γ.
#pragma once
#include "base.cuh"

constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The source of a step's and micro-batch's random numbers. The key is read when the kernel runs, so a captured step
// draws new numbers at each replay.
struct Random {
    const u64* key;
    u64 micro_batch;
};

struct Numbers {
    u64 key;
    u64 start;

    // The sequence of one place in the model, with `count` numbers per micro-batch.
    __device__ __forceinline__ static Numbers at(const Random& random, u64 place, u64 count) {
        return Numbers{mix(*random.key ^ mix(place + 1)), random.micro_batch * count};
    }

    __device__ __forceinline__ u64 bits(u64 index) const { return mix(key + (start + index) * GOLDEN); }

    // A uniform value in [0, 1), with 24 random bits.
    __device__ __forceinline__ f32 uniform(u64 index) const { return f32(u32(bits(index) >> 40)) * (1.0f / 16777216.0f); }

    // A value of the standard normal distribution (Box & Muller, 1958).
    __device__ __forceinline__ f32 normal(u64 index) const {
        const u64 both = bits(index);
        const auto unit = [](u32 half) { return (f64(half) + 0.5) / 4294967296.0; };
        return f32(sqrt(-2.0 * log(unit(u32(both >> 32)))) * cos(6.283185307179586 * unit(u32(both))));
    }
};

// The index in the whole tensor of element i of a part (`Spread` in window.rs).
__device__ __forceinline__ u64 spread(u64 i, u64 start, u64 inner, u64 near, u64 stride) {
    const u64 run = i / inner;
    return start + run / 2 * stride + run % 2 * near + i % inner;
}

// Rounds to one of the two nearest bf16 values, as an f32, by the lower 16 bits of `random`. CPU counterpart:
// rounded_stochastically of cpu/bf16.rs.
__device__ __forceinline__ f32 round_stochastically(f32 x, u32 random) {
    const u32 bits = bits_of(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return x;
    return __uint_as_float((bits + (random & 0xffffu)) & 0xffff0000u);
}

// Element i under dropout: zero if its 53 random bits are below the threshold, scaled otherwise.
__device__ __forceinline__ f32 dropped(const Numbers& numbers, u64 i, f32 x, u64 threshold, f32 scale) {
    return numbers.bits(i) >> 11 >= threshold ? x * scale : 0.0f;
}

// Element i times a factor that is uniform in [1 - amount, 1 + amount).
__device__ __forceinline__ f32 jittered(const Numbers& numbers, u64 i, f32 x, f32 amount) {
    return x * (1.0f + amount * (2.0f * numbers.uniform(i) - 1.0f));
}
