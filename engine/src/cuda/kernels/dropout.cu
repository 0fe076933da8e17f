// Noise that is drawn again wherever it is needed. Twins: ops/dropout.rs, ops/experts/jitter.rs. y may lie over x.
#include "random.cuh"

struct NoiseArguments {
    const void* x;
    void* y;
    u64 count;
    Random random;
    u64 place;
    // The probability of a zero, as a fraction of 2^53.
    u64 threshold;
    // What is left is multiplied by this; of jitter, the amount.
    f32 scale;
};

template <typename T>
__device__ void dropout(const NoiseArguments& to) {
    const Numbers numbers = Numbers::at(to.random, to.place, to.count);
    const u64 first = global_thread() * Pack<T>::SIZE, end = smaller(first + Pack<T>::SIZE, to.count);
    for (u64 i = first; i < end; ++i) {
        const bool stays = numbers.bits(i) >> 11 >= to.threshold;
        store((T*)to.y + i, stays ? load((const T*)to.x + i) * to.scale : 0.0f);
    }
}
KERNELS(dropout, NoiseArguments)

template <typename T>
__device__ void jitter(const NoiseArguments& to) {
    const Numbers numbers = Numbers::at(to.random, to.place, to.count);
    const u64 first = global_thread() * Pack<T>::SIZE, end = smaller(first + Pack<T>::SIZE, to.count);
    for (u64 i = first; i < end; ++i) {
        const f32 noise = 1.0f + to.scale * (2.0f * numbers.uniform(i) - 1.0f);
        store((T*)to.y + i, load((const T*)to.x + i) * noise);
    }
}
KERNELS(jitter, NoiseArguments)
