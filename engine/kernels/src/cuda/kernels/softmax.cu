// Softmax of rows, its normalizer, losses that use it, and their gradients. CPU counterparts: ops/softmax.rs,
// ops/experts/log_sum_exp.rs, ops/cross_entropy.rs, ops/linear_cross_entropy.rs. Each block processes one row. An output
// may share memory with an input of the same shape, because each element is read and overwritten by the same thread.
#include "copy_async.cuh"
#include "math.cuh"
#include "rows.cuh"
#include "strides.cuh"

// A row that a block processes in several passes.
template <typename T>
struct Row {
    static constexpr u32 PACK = Pack<T>::SIZE;
    const T* x;
    u64 width;
    // True if the row starts at an aligned address.
    bool is_packed;
    // Number of elements at the start of the row that are kept in shared memory, after the scratch of reductions. It is a
    // multiple of the pack size.
    u64 kept = 0;

    __device__ __forceinline__ static T* in_shared() { return (T*)(shared_memory + sizeof(f32) * MAX_WARPS); }

    // Copies the kept elements to shared memory. All copies are started at once. Each thread waits only for the elements
    // that it processes itself.
    __device__ __forceinline__ void keep() const {
        for (u64 i = u64(threadIdx.x) * PACK; i < kept; i += u64(blockDim.x) * PACK) copy_async(in_shared() + i, x + i, 16);
        close_copies();
        wait_for_copies<0>();
    }

    // Calls f(index, elements) for each group of this thread's elements, where `index` is that of the group's first
    // element.
    template <typename F>
    __device__ __forceinline__ void each(F f) const {
        each_of_row<PACK>(width, is_packed, [&](auto count, u64 i) {
            f32 all[decltype(count)::VALUE];
            if (decltype(count)::VALUE > 1 && i < kept) load_neighbours(all, in_shared() + i);
            else load_neighbours(all, x + i);
            f(i, all);
        });
    }

    // Like `each`, and stores the elements in y after f has changed them.
    template <typename F>
    __device__ __forceinline__ void map(T* y, F f) const {
        each([&](u64 i, auto& all) {
            f(i, all);
            store_neighbours(y + i, all);
        });
    }
};

// Returns the sum of exp(x - max) over a row, and stores the row's maximum in `max`, in one pass.
template <typename T>
__device__ __forceinline__ f32 sum_of_exponentials(const Row<T>& row, f32& max, f32* scratch) {
    // If all elements so far are minus infinity, nothing is subtracted, because the difference would be NaN.
    const auto base_of = [](f32 greatest) { return greatest == minus_infinity() ? 0.0f : greatest; };
    f32 own = minus_infinity(), sum = 0.0f;
    row.each([&](u64, const auto& all) {
        f32 greatest = own;
#pragma unroll
        for (const f32 x : all) greatest = fmaxf(greatest, x);
        const f32 base = base_of(greatest);
        sum *= exp_of(own - base);
#pragma unroll
        for (const f32 x : all) sum += exp_of(x - base);
        own = greatest;
    });
    max = max_block(own, scratch);
    return sum_block(sum * exp_of(own - base_of(max)), scratch);
}

struct SoftmaxArguments {
    const void* x;
    void* y;
    u64 width;
};

// Returns row number `blockIdx.x` of a contiguous tensor.
template <typename T>
__device__ __forceinline__ Row<T> row_of(const void* x, u64 width) {
    return {(const T*)x + blockIdx.x * width, width, are_packed((const T*)x, width)};
}

template <typename T>
__device__ void softmax(const SoftmaxArguments& to) {
    Row<T> row = row_of<T>(to.x, to.width);
    row.is_packed &= is_aligned(to.y);
    f32 max;
    const f32 scale = 1.0f / sum_of_exponentials(row, max, (f32*)shared_memory);
    row.map((T*)to.y + blockIdx.x * to.width, [&](u64, auto& all) {
        for (f32& x : all) x = exp_of(x - max) * scale;
    });
}
KERNELS(softmax, SoftmaxArguments)

template <typename T>
__device__ void log_sum_exp(const SoftmaxArguments& to) {
    f32 max;
    const f32 sum = sum_of_exponentials(row_of<T>(to.x, to.width), max, (f32*)shared_memory);
    if (threadIdx.x == 0) store((T*)to.y + blockIdx.x, max + logf(sum));
}
KERNELS(log_sum_exp, SoftmaxArguments)

struct SoftmaxGradArguments {
    const void* y;
    const void* dy;
    void* dx;
    u64 width;
};

// Computes dx = y·(dy - sum(y·dy)).
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

// The weights in a loss: of the target's logit, of every logit, and of the squared log-sum-exp (src/loss.rs).
struct LossTerms {
    f32 keep;
    f32 spread;
    f32 z;
};

// What the loss of a row depends on, for all of the row's logits x or for those of a rank.
struct Statistics {
    f32 max;
    // The sum of exp(x - max).
    f32 sum;
    // The target's logit; 0 if it is not among the logits.
    f32 logit;
    // The sum of x.
    f32 all;

    __device__ __forceinline__ f32 lse() const { return max + logf(sum); }
};

// Returns the statistics of a row of logits. `all` is computed only if `has_all` is true. All threads of the block must
// call this together.
template <typename T>
__device__ __forceinline__ Statistics statistics_of(const Row<T>& logits, u64 target, bool has_all, f32* scratch) {
    Statistics row = {};
    row.sum = sum_of_exponentials(logits, row.max, scratch);
    row.logit = target < logits.width ? load(logits.x + target) : 0.0f;
    if (has_all) {
        logits.each([&](u64, const auto& some) {
            for (const f32 x : some) row.all += x;
        });
        row.all = sum_block(row.all, scratch);
    }
    return row;
}

// Merges the statistics of all ranks for one row. `distance` is that from one rank's statistics of the row to the next's.
__device__ __forceinline__ Statistics merge(const Statistics* gathered, u64 ranks, u64 distance) {
    Statistics row = {minus_infinity(), 0.0f, 0.0f, 0.0f};
    for (u64 i = 0; i < ranks; ++i) row.max = fmaxf(row.max, gathered[i * distance].max);
    for (u64 i = 0; i < ranks; ++i) {
        const Statistics of_rank = gathered[i * distance];
        row.sum += of_rank.sum * exp_of(of_rank.max - row.max);
        row.logit += of_rank.logit;
        row.all += of_rank.all;
    }
    return row;
}

// Returns the loss of a row with these statistics.
__device__ __forceinline__ f32 loss_of(const LossTerms& terms, const Statistics& row) {
    const f32 lse = row.lse();
    return lse - terms.keep * row.logit - terms.spread * row.all + terms.z * lse * lse;
}

// Replaces a group of logits, whose first index is i, by exp(x - base)·scale - spread. Then subtracts `keep` from the
// target's element.
template <u32 N>
__device__ __forceinline__ void differentiate(f32 (&all)[N], u64 i, f32 base, f32 scale, const LossTerms& terms, u64 target) {
#pragma unroll
    for (u32 j = 0; j < N; ++j) all[j] = exp_of(all[j] - base) * scale - terms.spread;
    if (target - i >= N) return;
#pragma unroll
    for (u32 j = 0; j < N; ++j) all[j] -= i + j == target ? terms.keep : 0.0f;
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
    const Row<T> logits = row_of<T>(to.logits, to.width);
    const bool has_all = to.terms.spread != 0.0f;
    const Statistics row = statistics_of(logits, to.targets[blockIdx.x], has_all, (f32*)shared_memory);
    if (threadIdx.x == 0) {
        to.lse[blockIdx.x] = row.lse();
        to.losses[blockIdx.x] = loss_of(to.terms, row);
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

// Computes d_logits. Without further loss terms it is (softmax - one-hot)·d_loss.
template <typename T>
__device__ void cross_entropy_grad(const CrossEntropyGradArguments& to) {
    const u64 row = blockIdx.x;
    Row<T> logits = row_of<T>(to.logits, to.width);
    logits.is_packed &= is_aligned(to.d_logits);
    const f32 lse = to.lse[row], d_loss = to.d_losses[to.at_d_losses.at(row)];
    const u64 target = to.targets[row];
    const f32 of_softmax = 1.0f + 2.0f * to.terms.z * lse;
    logits.map((T*)to.d_logits + row * to.width, [&](u64 i, auto& all) {
        differentiate(all, i, lse, of_softmax, to.terms, target);
        for (f32& x : all) x *= d_loss;
    });
}
KERNELS(cross_entropy_grad, CrossEntropyGradArguments)

struct HeadArguments {
    void* logits;
    const u32* targets;
    f32* losses;
    // The losses without the further loss terms; null if they are not stored.
    f32* likelihoods;
    // The gradients of the losses. If this is null, the gradient of every loss is `d_loss` times the row's weight.
    const f32* d_losses;
    // The weights of the losses; null if all are 1.
    const f32* weights;
    u64 width;
    // Distance from one row of logits to the next, in elements.
    u64 pitch;
    // The index in `d_losses` that belongs to the chunk's first row.
    u64 first_row;
    // The address of the logits of the vocabulary's last entries, with REST logits per row. It is null if these logits
    // are stored with the others.
    void* rest;
    // The index of the first of the vocabulary's last entries.
    u64 entries;
    Strides at_d_losses;
    f32 d_loss;
    u32 has_gradient;
    // If above 0, each logit x is replaced by cap·tanh(x/cap).
    f32 cap;
    LossTerms terms;
    // Number of elements at the start of a row that are kept in shared memory, a multiple of the pack size.
    u64 kept;
    // The vocabulary entry of the first logit.
    u64 first_entry;
    // The statistics of the ranks that divide the vocabulary, for the chunk's first row; null if the logits are those of
    // the whole vocabulary.
    const Statistics* gathered;
    u64 ranks;
    // Distance from one rank's statistics of a row to the next's.
    u64 distance;
    // If this is not null, the kernel stores the statistics of each row here instead of its loss.
    Statistics* statistics;
};

constexpr u64 REST = 8;

// Processes one chunk of a language model's head. Computes the losses of its rows and, with `has_gradient`, replaces the
// logits by their gradient. If the statistics of all ranks are given and there is no gradient, the logits are not read.
template <typename T>
__device__ void head(const HeadArguments& to) {
    const u64 row = blockIdx.x;
    T* const at = (T*)to.logits + row * to.pitch;
    const Row<T> logits = {at, to.width, are_packed((const T*)to.logits, to.pitch), to.kept};
    // If another rank holds the target's logit, the index is not below the width.
    const u64 target = u64(to.targets[row]) - to.first_entry;
    const f32 cap = to.cap, weight = to.weights ? to.weights[row] : 1.0f;
    const LossTerms terms = to.terms;
    Statistics statistics = {};
    if (to.gathered) statistics = merge(to.gathered + row, to.ranks, to.distance);
    const bool has_logits = to.has_gradient || !to.gathered;
    T* rest = to.rest ? (T*)to.rest + row * REST : nullptr;
    const u64 rest_column = to.entries + threadIdx.x;
    if (has_logits && rest) {
        if (rest_column < to.width) at[rest_column] = rest[threadIdx.x];
        __syncthreads(); // The row is complete.
    }
    if (to.kept > 0) logits.keep();
    if (has_logits && cap > 0.0f) {
        logits.map(at, [&](u64, auto& all) {
            for (f32& x : all) x = cap * tanhf(x / cap);
        });
        __syncthreads(); // The target's logit has been written.
    }
    if (!to.gathered) {
        const bool has_all = to.statistics || terms.spread != 0.0f;
        statistics = statistics_of(logits, target, has_all, (f32*)shared_memory);
    }
    const f32 lse = statistics.lse(), max = statistics.max, sum = statistics.sum;
    if (threadIdx.x == 0) {
        if (to.statistics) to.statistics[row] = statistics;
        else to.losses[row] = weight * loss_of(terms, statistics);
        if (to.likelihoods) to.likelihoods[row] = weight * (lse - statistics.logit);
    }
    if (!to.has_gradient) return;
    const f32 d_loss = to.d_losses ? to.d_losses[to.at_d_losses.at(to.first_row + row)] : weight * to.d_loss;
    __syncthreads(); // The loss has been read from the logits.
    const f32 scale = (1.0f + 2.0f * terms.z * lse) / sum;
    logits.map(at, [&](u64 i, auto& all) {
        constexpr u32 N = sizeof(all) / sizeof(f32);
        if (cap > 0.0f) {
            f32 slopes[N];
            for (u32 j = 0; j < N; ++j) slopes[j] = (1.0f - all[j] / cap * (all[j] / cap)) * d_loss;
            differentiate(all, i, max, scale, terms, target);
            for (u32 j = 0; j < N; ++j) all[j] *= slopes[j];
        } else {
            differentiate(all, i, max, scale, terms, target);
#pragma unroll
            for (f32& x : all) x *= d_loss;
        }
    });
    if (rest) {
        __syncthreads(); // Every gradient has been written.
        if (rest_column < to.width) rest[threadIdx.x] = at[rest_column];
    }
}
KERNELS(head, HeadArguments)
