// Softmax of rows, its normaliser, and losses by it, with their gradients. Twins: ops/softmax.rs, ops/experts/log_sum_exp.rs,
// ops/cross_entropy.rs, ops/linear_cross_entropy.rs. A block has one row. An output may lie over an input of its shape: a thread
// overwrites what it alone reads.
#include "rows.cuh"
#include "strides.cuh"

// The greatest of a row, and the sum of exp(x - max).
template <typename T>
__device__ __forceinline__ f32 sum_of_exponentials(const T* x, u64 width, bool is_packed, f32& max, f32* scratch) {
    // What has been seen of minus infinity alone has no greatest to take off.
    const auto base_of = [](f32 greatest) { return greatest == minus_infinity() ? 0.0f : greatest; };
    f32 own = minus_infinity(), sum = 0.0f;
    each_of_row<Pack<T>::SIZE>(width, is_packed, [&](auto count, u64 i) {
        f32 of_x[decltype(count)::VALUE];
        load_neighbours(of_x, x + i);
        f32 greatest = own;
        for (const f32 x : of_x) greatest = fmaxf(greatest, x);
        const f32 base = base_of(greatest);
        sum *= expf(own - base);
        for (const f32 x : of_x) sum += expf(x - base);
        own = greatest;
    });
    max = max_block(own, scratch);
    return sum_block(sum * expf(own - base_of(max)), scratch);
}

// y[i] = f(i, x[i]) for a row.
template <typename T, typename F>
__device__ __forceinline__ void map_row(const T* x, T* y, u64 width, bool is_packed, F f) {
    each_of_row<Pack<T>::SIZE>(width, is_packed, [&](auto count, u64 i) {
        f32 all[decltype(count)::VALUE];
        load_neighbours(all, x + i);
        for (u32 j = 0; j < decltype(count)::VALUE; ++j) all[j] = f(i + j, all[j]);
        store_neighbours(y + i, all);
    });
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
    const bool is_packed = are_packed((const T*)to.x, to.width) && is_aligned(to.y);
    f32 max;
    const f32 scale = 1.0f / sum_of_exponentials(x, to.width, is_packed, max, (f32*)shared_memory);
    map_row(x, y, to.width, is_packed, [&](u64, f32 x) { return expf(x - max) * scale; });
}
KERNELS(softmax, SoftmaxArguments)

template <typename T>
__device__ void log_sum_exp(const SoftmaxArguments& to) {
    const T* x = (const T*)to.x;
    f32 max;
    const f32 sum =
        sum_of_exponentials(x + blockIdx.x * to.width, to.width, are_packed(x, to.width), max, (f32*)shared_memory);
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
    const bool is_packed = are_packed((const T*)to.y, to.width) && is_aligned(to.dy) && is_aligned(to.dx);
    f32 dot = 0.0f;
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_y[N], of_dy[N];
        load_neighbours(of_y, y + i);
        load_neighbours(of_dy, dy + i);
        for (u32 j = 0; j < N; ++j) dot += of_y[j] * of_dy[j];
    });
    dot = sum_block(dot, (f32*)shared_memory);
    each_of_row<Pack<T>::SIZE>(to.width, is_packed, [&](auto count, u64 i) {
        constexpr u32 N = decltype(count)::VALUE;
        f32 of_y[N], of_dy[N];
        load_neighbours(of_y, y + i);
        load_neighbours(of_dy, dy + i);
        for (u32 j = 0; j < N; ++j) of_y[j] *= of_dy[j] - dot;
        store_neighbours(dx + i, of_y);
    });
}
KERNELS(softmax_grad, SoftmaxGradArguments)

// What a loss counts: of the target's own logit, of every logit, and of the square of the log-sum-exp (src/loss.rs).
struct LossTerms {
    f32 keep;
    f32 spread;
    f32 z;
};

// The loss of a row of logits with its log-sum-exp, in the first thread.
template <typename T>
__device__ __forceinline__ f32
loss_of(const LossTerms& terms, const T* logits, u64 width, bool is_packed, f32 lse, u64 target, f32* scratch) {
    f32 all = 0.0f;
    if (terms.spread != 0.0f) {
        each_of_row<Pack<T>::SIZE>(width, is_packed, [&](auto count, u64 i) {
            f32 of_x[decltype(count)::VALUE];
            load_neighbours(of_x, logits + i);
            for (const f32 x : of_x) all += x;
        });
        all = sum_block(all, scratch);
    }
    return lse - terms.keep * load(logits + target) - terms.spread * all + terms.z * lse * lse;
}

struct CrossEntropyArguments {
    const void* logits;
    const u32* targets;
    f32* losses;
    f32* lse;
    u64 width;
    LossTerms terms;
};

template <typename T>
__device__ void cross_entropy(const CrossEntropyArguments& to) {
    const T* logits = (const T*)to.logits + blockIdx.x * to.width;
    f32 max;
    const bool is_packed = are_packed((const T*)to.logits, to.width);
    const f32 sum = sum_of_exponentials(logits, to.width, is_packed, max, (f32*)shared_memory);
    const f32 lse = max + logf(sum);
    const f32 loss =
        loss_of(to.terms, logits, to.width, is_packed, lse, to.targets[blockIdx.x], (f32*)shared_memory);
    if (threadIdx.x == 0) {
        to.lse[blockIdx.x] = lse;
        to.losses[blockIdx.x] = loss;
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
    LossTerms terms;
};

// d_logits, without further terms (softmax - one-hot)·d_loss.
template <typename T>
__device__ void cross_entropy_grad(const CrossEntropyGradArguments& to) {
    const u64 row = blockIdx.x;
    const T* logits = (const T*)to.logits + row * to.width;
    T* d_logits = (T*)to.d_logits + row * to.width;
    const f32 lse = to.lse[row], d_loss = to.d_losses[to.at_d_losses.at(row)];
    const u64 target = to.targets[row];
    const bool is_packed = are_packed((const T*)to.logits, to.width) && is_aligned(to.d_logits);
    const LossTerms terms = to.terms;
    const f32 of_softmax = 1.0f + 2.0f * terms.z * lse;
    map_row(logits, d_logits, to.width, is_packed, [&](u64 i, f32 x) {
        return (expf(x - lse) * of_softmax - (i == target ? terms.keep : 0.0f) - terms.spread) * d_loss;
    });
}
KERNELS(cross_entropy_grad, CrossEntropyGradArguments)

struct HeadArguments {
    void* logits;
    const u32* targets;
    f32* losses;
    // Losses without what else is counted, or none.
    f32* likelihoods;
    // None if the gradient of every loss is `d_loss`, times its weight.
    const f32* d_losses;
    // What losses are multiplied by, or none.
    const f32* weights;
    u64 width;
    // Elements from one row of logits to the next.
    u64 pitch;
    // The first of these rows among those of d_losses.
    u64 first_row;
    // The logits of the vocabulary's last entries, REST to a row, if these lie apart; and the first of them.
    void* rest;
    u64 entries;
    Strides at_d_losses;
    f32 d_loss;
    u32 has_gradient;
    // Above 0, a logit x counts as cap·tanh(x/cap).
    f32 cap;
    LossTerms terms;
};

constexpr u64 REST = 8;

// One chunk of the head of a language model: the losses of its rows, and over the logits, if asked for, their gradient.
template <typename T>
__device__ void head(const HeadArguments& to) {
    const u64 row = blockIdx.x;
    T* logits = (T*)to.logits + row * to.pitch;
    const u64 target = to.targets[row];
    const bool is_packed = are_packed((const T*)to.logits, to.pitch);
    const f32 cap = to.cap, weight = to.weights ? to.weights[row] : 1.0f;
    T* rest = to.rest ? (T*)to.rest + row * REST : nullptr;
    const u64 rest_column = to.entries + threadIdx.x;
    if (rest) {
        if (rest_column < to.width) logits[rest_column] = rest[threadIdx.x];
        __syncthreads(); // The row is whole.
    }
    if (cap > 0.0f) {
        map_row(logits, logits, to.width, is_packed, [&](u64, f32 x) { return cap * tanhf(x / cap); });
        __syncthreads(); // The target's logit has been written.
    }
    f32 max;
    const f32 sum = sum_of_exponentials(logits, to.width, is_packed, max, (f32*)shared_memory);
    const f32 lse = max + logf(sum);
    const LossTerms terms = to.terms;
    const f32 loss = loss_of(terms, logits, to.width, is_packed, lse, target, (f32*)shared_memory);
    if (threadIdx.x == 0) {
        to.losses[row] = weight * loss;
        if (to.likelihoods) to.likelihoods[row] = weight * (lse - load(logits + target));
    }
    if (!to.has_gradient) return;
    const f32 d_loss = to.d_losses ? to.d_losses[to.at_d_losses.at(to.first_row + row)] : weight * to.d_loss;
    __syncthreads(); // The loss has been read from the logits.
    const f32 scale = (1.0f + 2.0f * terms.z * lse) / sum;
    map_row(logits, logits, to.width, is_packed, [&](u64 i, f32 x) {
        const f32 slope = cap > 0.0f ? 1.0f - x / cap * (x / cap) : 1.0f;
        return (expf(x - max) * scale - (i == target ? terms.keep : 0.0f) - terms.spread) * slope * d_loss;
    });
    if (rest) {
        __syncthreads(); // Every gradient has been written.
        if (rest_column < to.width) rest[threadIdx.x] = logits[rest_column];
    }
}
KERNELS(head, HeadArguments)
