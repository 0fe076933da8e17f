// Noise that is drawn again wherever it is needed. Twins: ops/dropout.rs, ops/experts/jitter.rs. y may lie over x.
#include "elements.cuh"
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
    const u64 threshold = to.threshold;
    const f32 scale = to.scale;
    map((const T*)to.x, (T*)to.y, to.count, [=](u64 i, f32 x) -> f32 {
        return dropped(numbers, i, x, threshold, scale);
    });
}
KERNELS(dropout, NoiseArguments)

template <typename T>
__device__ void jitter(const NoiseArguments& to) {
    const Numbers numbers = Numbers::at(to.random, to.place, to.count);
    const f32 amount = to.scale;
    map((const T*)to.x, (T*)to.y, to.count, [=](u64 i, f32 x) -> f32 {
        return jittered(numbers, i, x, amount);
    });
}
KERNELS(jitter, NoiseArguments)
