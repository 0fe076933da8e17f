// AdamW updates of many tensors per launch, weight averages, and the norm of gradients. CPU counterparts:
// optim/adamw.rs, optim/average.rs, optim/global_norm.rs.
#include "last_block.cuh"
#include "random.cuh"
#include "rows.cuh"

// Most tensors per launch: MAX_UPDATED for updates, and MAX_TENSORS for norms. With these numbers, the arguments fit
// into the 4096 bytes that a kernel may take.
constexpr u32 MAX_UPDATED = 60;
constexpr u32 MAX_TENSORS = 160;

struct AdamWTensor {
    void* parameter;
    // The f32 master copy of a parameter that is stored in bf16; null for a parameter stored in f32.
    f32* master;
    const void* gradient;
    // The moments, f32. They have the parameter's type if it is stored in bf16 without a master.
    void* m;
    void* v;
    u64 count;
    // The index of the tensor's first block in the launch.
    u32 first_block;
    f32 decay;
    // The tensor and the part of stochastic rounding.
    u32 tensor;
    u32 part;
};

struct AdamWArguments {
    AdamWTensor tensors[MAX_UPDATED];
    u64 tensor_count;
    const f32* norm;
    // Learning rate, 1 - beta1^t and 1 - beta2^t, where t is the step's number.
    const f32* scalars;
    // The key of random numbers for stochastic rounding; null without it.
    const u64* key;
    f32 max_norm;
    f32 beta1;
    f32 beta2;
    f32 eps;
    // True if gradients are f32. Otherwise they have the parameters' type.
    u32 sums_in_f32;
};

// Number of elements that a block updates.
constexpr u32 ADAMW_LENGTH = 2048;

// Returns the index of the tensor that this block processes.
template <typename Tensor>
__device__ __forceinline__ u32 tensor_of(const Tensor* tensors, u64 count) {
    u32 tensor = 0, end = u32(count);
    while (tensor + 1 < end) {
        const u32 middle = (tensor + end) / 2;
        if (blockIdx.x >= tensors[middle].first_block) tensor = middle;
        else end = middle;
    }
    return tensor;
}

// Number of neighboring elements that a thread updates at a time.
constexpr u32 UPDATED = 4;

// The first of the places of tensors: StochasticRounding::PLACES of random.rs.
constexpr u64 PLACES = 1ull << 32;

// Updates parameters of type T with moments of type M. With STOCHASTIC, both are bf16.
template <typename T, typename M = f32, bool STOCHASTIC = false>
__device__ void adamw(const AdamWArguments& to) {
    const f32 norm = *to.norm;
    // If the norm is not finite, the step is skipped and the model does not change.
    if (!(fabsf(norm) < __uint_as_float(0x7f800000u))) return;
    const AdamWTensor& of = to.tensors[tensor_of(to.tensors, to.tensor_count)];
    const f32 lr = to.scalars[0];
    const f32 clip = fminf(to.max_norm / (norm + 1e-6f), 1.0f);
    const f32 keep = 1.0f - lr * of.decay, step = lr / to.scalars[1], root = 1.0f / sqrtf(to.scalars[2]);
    const u64 first = u64(blockIdx.x - of.first_block) * ADAMW_LENGTH, end = smaller(first + ADAMW_LENGTH, of.count);
    Numbers numbers{};
    if constexpr (STOCHASTIC) numbers = Numbers::at(Random{to.key, of.part}, PLACES + of.tensor, of.count);
    const bool is_packed = is_aligned(of.parameter) && is_aligned(of.master) && is_aligned(of.gradient) && is_aligned(of.m) &&
                           is_aligned(of.v);
    each_of_row<UPDATED>(end - first, is_packed, [&](auto count, u64 place) {
        constexpr u32 N = decltype(count)::VALUE;
        const u64 i = first + place;
        f32 g[N], m[N], v[N], parameter[N];
        load_neighbours(m, (const M*)of.m + i);
        load_neighbours(v, (const M*)of.v + i);
        if (of.master) load_neighbours(parameter, of.master + i);
        else load_neighbours(parameter, (const T*)of.parameter + i);
        // The gradient is loaded last. A bf16 gradient is unpacked inside its branch, and the thread has to wait for the
        // load there.
        if (to.sums_in_f32) load_neighbours(g, (const f32*)of.gradient + i);
        else load_neighbours(g, (const T*)of.gradient + i);
#pragma unroll
        for (u32 j = 0; j < N; ++j) {
            g[j] *= clip;
            m[j] = to.beta1 * m[j] + (1.0f - to.beta1) * g[j];
            v[j] = to.beta2 * v[j] + (1.0f - to.beta2) * g[j] * g[j];
            parameter[j] = parameter[j] * keep - step * m[j] / (sqrtf(v[j]) * root + to.eps);
            if constexpr (STOCHASTIC) {
                const u64 random = numbers.bits(i + j);
                parameter[j] = round_stochastically(parameter[j], u32(random));
                m[j] = round_stochastically(m[j], u32(random >> 16));
                v[j] = round_stochastically(v[j], u32(random >> 32));
            }
        }
        store_neighbours((M*)of.m + i, m);
        store_neighbours((M*)of.v + i, v);
        if (of.master) store_neighbours(of.master + i, parameter);
        store_neighbours((T*)of.parameter + i, parameter);
    });
}
KERNELS(adamw, AdamWArguments)
KERNEL(adamw_pure_bf16, AdamWArguments) { adamw<bf16, bf16>(arguments); }
KERNEL(adamw_stochastic_bf16, AdamWArguments) { adamw<bf16, bf16, true>(arguments); }

struct AverageArguments {
    f32* average;
    const void* parameter;
    const f32* norm;
    u64 count;
    // The weight of the parameter in the average.
    f32 part;
};

// Updates the average of a parameter over steps. CPU counterpart: optim/average.rs.
template <typename T>
__device__ void weight_average(const AverageArguments& to) {
    const f32 norm = *to.norm;
    const u64 i = global_thread();
    if (i >= to.count || !(norm - norm == 0.0f)) return;
    to.average[i] += to.part * (load((const T*)to.parameter + i) - to.average[i]);
}
KERNELS(weight_average, AverageArguments)

struct NormTensor {
    const void* x;
    u64 count;
    u64 first_block;
};

struct SquaredNormsArguments {
    NormTensor tensors[MAX_TENSORS];
    u64 tensor_count;
    // One partial sum per block.
    f32* parts;
    // One ticket per tensor.
    u32* tickets;
    f64* out;
};

// Number of elements whose squares a block adds up.
constexpr u32 NORM_LENGTH = 16384;

// Adds up the squares of a block's elements. When the last block of a tensor finishes, one of its warps adds up the
// tensor's partial sums.
template <typename T>
__device__ void squared_norms(const SquaredNormsArguments& to) {
    const u32 tensor = tensor_of(to.tensors, to.tensor_count);
    const NormTensor& of = to.tensors[tensor];
    const u64 first = (blockIdx.x - of.first_block) * NORM_LENGTH, end = smaller(first + NORM_LENGTH, of.count);
    f32 sum = 0.0f;
    const T* x = (const T*)of.x + first;
    each_of_row<Pack<T>::SIZE>(end - first, is_aligned(x), [&](auto count, u64 i) {
        f32 of_x[decltype(count)::VALUE];
        load_neighbours(of_x, x + i);
        for (const f32 x : of_x) sum += x * x;
    });
    sum = sum_block(sum, (f32*)shared_memory);
    if (threadIdx.x == 0) to.parts[blockIdx.x] = sum;
    const u64 parts = of.count > NORM_LENGTH ? (of.count + NORM_LENGTH - 1) / NORM_LENGTH : 1;
    if (!is_last_block(to.tickets + tensor, u32(parts)) || warp_of() != 0) return;
    __syncwarp(); // is_last_block has no barrier for a tensor with only one block.
    f64 all = 0.0;
    for (u64 part = lane_of(); part < parts; part += 32) all += to.parts[of.first_block + part];
    for (u32 distance = 16; distance > 0; distance /= 2) all += __shfl_xor_sync(ALL_LANES, all, distance);
    if (lane_of() == 0) to.out[tensor] = all;
}
KERNELS(squared_norms, SquaredNormsArguments)

struct GlobalNormArguments {
    NormTensor tensors[MAX_TENSORS];
    u64 tensor_count;
    f64* sorted;
    f32* out;
    u64 count;
};

// Returns value number i of the concatenated tensors.
__device__ __forceinline__ f64 at(const GlobalNormArguments& from, u64 i) {
    u32 tensor = 0;
    while (i >= from.tensors[tensor].count) i -= from.tensors[tensor++].count;
    return ((const f64*)from.tensors[tensor].x)[i];
}

// Concatenates the values of all tensors.
KERNEL(side_by_side, GlobalNormArguments) {
    const u64 i = global_thread();
    if (i < arguments.count) arguments.sorted[i] = at(arguments, i);
}

// Returns the sum over all threads of `own` in the first thread, and 0 in all others.
__device__ __forceinline__ f64 sum_threads(f64 own, f64* sums) {
    __syncthreads(); // Other threads may still read the values of the previous sum.
    sums[threadIdx.x] = own;
    for (u32 distance = blockDim.x / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
    }
    return threadIdx.x == 0 ? sums[0] : 0.0; // Only the first thread may read what it wrote last.
}

// Computes the square root of the sum of all values. The values are sorted by size first. The order of additions
// depends only on the sorted values: neither the tensors that contain the values nor additional zeros change the
// result. The kernel runs as one block, with one f64 per thread in shared memory.
KERNEL(global_norm, GlobalNormArguments) {
    f64* numbers = (f64*)shared_memory;
    const u64 count = arguments.count;
    f64 any_order = 0.0;
    for (u64 start = 0; start < count; start += blockDim.x) {
        const u64 i = start + threadIdx.x;
        const f64 own = i < count ? at(arguments, i) : 0.0;
        any_order += own;
        u64 rank = 0;
        for (u64 other = 0; other < count; other += blockDim.x) {
            const u32 there = u32(smaller(blockDim.x, count - other));
            __syncthreads(); // Other threads may still read the previous values.
            if (threadIdx.x < there) numbers[threadIdx.x] = at(arguments, other + threadIdx.x);
            __syncthreads();
            for (u32 j = 0; j < there; ++j) rank += numbers[j] < own || (!(own < numbers[j]) && other + j < i);
        }
        if (i < count) arguments.sorted[rank] = own;
    }
    __syncthreads();
    // Each thread adds every `blockDim.x`-th value, counted from the largest. So additional zeros do not change the
    // result.
    f64 sum = 0.0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) sum += arguments.sorted[count - 1 - i];
    sum = sum_threads(sum, numbers);
    any_order = sum_threads(any_order, numbers);
    // NaN has no order, so it may be missing among the sorted values. In that case the result is the sum in the original
    // order, which is not finite.
    if (!(any_order - any_order == 0.0)) sum = any_order;
    if (threadIdx.x == 0) *arguments.out = f32(sqrt(sum));
}
