// Softmax of rows, its normaliser, and losses by it, with their gradients. Twins: ops/softmax.rs, ops/experts/log_sum_exp.rs,
// ops/cross_entropy.rs, ops/linear_cross_entropy.rs. A block has one row. An output may lie over an input of its shape: a thread
// overwrites what it alone reads.
#include "reduce.cuh"
#include "strides.cuh"

// The greatest of a row, and the sum of exp(x - max).
template <typename T>
__device__ __forceinline__ f32 sum_of_exponentials(const T* x, u64 width, f32& max, f32* scratch) {
    f32 own = minus_infinity();
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) own = fmaxf(own, load(x + i));
    max = max_block(own, scratch);
    f32 sum = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) sum += expf(load(x + i) - max);
    return sum_block(sum, scratch);
}

struct SoftmaxArguments {
    const void* x;
    void* y;
    u64 width;
};

template <typename T>
__device__ void softmax(const SoftmaxArguments& to) {
    const T* x = (const T*)to.x + blockIdx.x * to.width;
    T* y = (T*)to.y + blockIdx.x * to.width;
    f32 max;
    const f32 scale = 1.0f / sum_of_exponentials(x, to.width, max, (f32*)shared_memory);
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) store(y + i, expf(load(x + i) - max) * scale);
}
KERNELS(softmax, SoftmaxArguments)

template <typename T>
__device__ void log_sum_exp(const SoftmaxArguments& to) {
    f32 max;
    const f32 sum = sum_of_exponentials((const T*)to.x + blockIdx.x * to.width, to.width, max, (f32*)shared_memory);
    if (threadIdx.x == 0) store((T*)to.y + blockIdx.x, max + logf(sum));
}
KERNELS(log_sum_exp, SoftmaxArguments)

struct SoftmaxGradArguments {
    const void* y;
    const void* dy;
    void* dx;
    u64 width;
};

// dx = y·(dy - sum(y·dy)).
template <typename T>
__device__ void softmax_grad(const SoftmaxGradArguments& to) {
    const u64 row = blockIdx.x * to.width;
    const T *y = (const T*)to.y + row, *dy = (const T*)to.dy + row;
    T* dx = (T*)to.dx + row;
    f32 dot = 0.0f;
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) dot += load(y + i) * load(dy + i);
    dot = sum_block(dot, (f32*)shared_memory);
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) store(dx + i, load(y + i) * (load(dy + i) - dot));
}
KERNELS(softmax_grad, SoftmaxGradArguments)

struct CrossEntropyArguments {
    const void* logits;
    const u32* targets;
    f32* losses;
    f32* lse;
    u64 width;
};

template <typename T>
__device__ void cross_entropy(const CrossEntropyArguments& to) {
    const T* logits = (const T*)to.logits + blockIdx.x * to.width;
    f32 max;
    const f32 sum = sum_of_exponentials(logits, to.width, max, (f32*)shared_memory);
    if (threadIdx.x == 0) {
        const f32 lse = max + logf(sum);
        to.lse[blockIdx.x] = lse;
        to.losses[blockIdx.x] = lse - load(logits + to.targets[blockIdx.x]);
    }
}
KERNELS(cross_entropy, CrossEntropyArguments)

struct CrossEntropyGradArguments {
    const void* logits;
    const u32* targets;
    const f32* lse;
    const f32* d_losses;
    void* d_logits;
    u64 width;
    Strides at_d_losses;
};

// d_logits = (softmax - one-hot)·d_loss.
template <typename T>
__device__ void cross_entropy_grad(const CrossEntropyGradArguments& to) {
    const u64 row = blockIdx.x;
    const T* logits = (const T*)to.logits + row * to.width;
    T* d_logits = (T*)to.d_logits + row * to.width;
    const f32 lse = to.lse[row], d_loss = to.d_losses[to.at_d_losses.at(row)];
    const u64 target = to.targets[row];
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        store(d_logits + i, (expf(load(logits + i) - lse) - (i == target ? 1.0f : 0.0f)) * d_loss);
    }
}
KERNELS(cross_entropy_grad, CrossEntropyGradArguments)

struct HeadArguments {
    void* logits;
    const u32* targets;
    f32* losses;
    // None if the gradient of every loss is `d_loss`.
    const f32* d_losses;
    u64 width;
    // The first of these rows among those of d_losses.
    u64 first_row;
    Strides at_d_losses;
    f32 d_loss;
    u32 has_gradient;
};

// One chunk of the head of a language model: the losses of its rows, and over the logits, if asked for, their gradient.
template <typename T>
__device__ void head(const HeadArguments& to) {
    const u64 row = blockIdx.x;
    T* logits = (T*)to.logits + row * to.width;
    const u64 target = to.targets[row];
    f32 max;
    const f32 sum = sum_of_exponentials(logits, to.width, max, (f32*)shared_memory);
    if (threadIdx.x == 0) to.losses[row] = max + logf(sum) - load(logits + target);
    if (!to.has_gradient) return;
    const f32 d_loss = to.d_losses ? to.d_losses[to.at_d_losses.at(to.first_row + row)] : to.d_loss;
    __syncthreads(); // The loss has been read from the logits.
    for (u64 i = threadIdx.x; i < to.width; i += blockDim.x) {
        store(logits + i, (expf(load(logits + i) - max) / sum - (i == target ? 1.0f : 0.0f)) * d_loss);
    }
}
KERNELS(head, HeadArguments)
