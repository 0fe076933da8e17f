// Functions of each element: y = f(x), y = f(a, b) with broadcast operands, and gated units. Twins: ops/unary.rs,
// ops/binary.rs, ops/affine.rs, ops/swiglu.rs. An output may lie over an operand of the same strides.
#include "base.cuh"
#include "math.cuh"
#include "strides.cuh"

struct Elements {
    u64 count;
    // First and behind-last element of this thread: a pack.
    template <typename T>
    __device__ __forceinline__ bool range(u64& first, u64& end) const {
        first = global_thread() * Pack<T>::SIZE;
        end = smaller(first + Pack<T>::SIZE, count);
        return first < count;
    }
};

// y[i] = f(x[i]).
template <typename T, typename F>
__device__ __forceinline__ void map(const T* x, T* y, u64 count, F f) {
    u64 first, end;
    if (!Elements{count}.template range<T>(first, end)) return;
    if (end - first == Pack<T>::SIZE && is_aligned(x) && is_aligned(y)) {
        Pack<T> pack = *reinterpret_cast<const Pack<T>*>(x + first);
        for (u32 i = 0; i < Pack<T>::SIZE; ++i) store(&pack.at[i], f(load(&pack.at[i])));
        *reinterpret_cast<Pack<T>*>(y + first) = pack;
        return;
    }
    for (u64 i = first; i < end; ++i) store(y + i, f(load(x + i)));
}

// y[i] = f(a[i], b[i]).
template <typename T, typename F>
__device__ __forceinline__ void zip(const T* a, const T* b, T* y, u64 count, F f) {
    u64 first, end;
    if (!Elements{count}.template range<T>(first, end)) return;
    if (end - first == Pack<T>::SIZE && is_aligned(a) && is_aligned(b) && is_aligned(y)) {
        Pack<T> pack = *reinterpret_cast<const Pack<T>*>(a + first);
        const Pack<T> other = *reinterpret_cast<const Pack<T>*>(b + first);
        for (u32 i = 0; i < Pack<T>::SIZE; ++i) store(&pack.at[i], f(load(&pack.at[i]), load(&other.at[i])));
        *reinterpret_cast<Pack<T>*>(y + first) = pack;
        return;
    }
    for (u64 i = first; i < end; ++i) store(y + i, f(load(a + i), load(b + i)));
}

struct MapArguments {
    const void* x;
    void* y;
    u64 count;
    f32 scale;
    f32 shift;
};

struct ZipArguments {
    const void* a;
    const void* b;
    void* y;
    u64 count;
};

#define UNARY(name, value, derivative)                                                                          \
    template <typename T>                                                                                       \
    __device__ void name(const MapArguments& to) {                                                              \
        map((const T*)to.x, (T*)to.y, to.count, [](f32 x) -> f32 { return value; });                            \
    }                                                                                                           \
    KERNELS(name, MapArguments)                                                                                 \
    template <typename T>                                                                                       \
    __device__ void name##_grad(const ZipArguments& to) {                                                       \
        zip((const T*)to.a, (const T*)to.b, (T*)to.y, to.count, [](f32 x, f32 dy) -> f32 { return derivative; }); \
    }                                                                                                           \
    KERNELS(name##_grad, ZipArguments)

UNARY(unary_exp, expf(x), dy * expf(x))
UNARY(unary_log, logf(x), dy / x)
UNARY(unary_sqr, x * x, dy * 2.0f * x)
UNARY(unary_sqrt, sqrtf(x), dy * 0.5f / sqrtf(x))
UNARY(unary_recip, 1.0f / x, -dy / (x * x))
UNARY(unary_tanh, tanhf(x), dy * (1.0f - tanhf(x) * tanhf(x)))
UNARY(unary_sigmoid, sigmoid(x), dy * sigmoid(x) * (1.0f - sigmoid(x)))
UNARY(unary_relu, fmaxf(x, 0.0f), x > 0.0f ? dy : 0.0f)
UNARY(unary_silu, silu(x), dy * silu_derivative(x))
UNARY(unary_gelu, gelu(x), dy * gelu_derivative(x))
UNARY(unary_gelu_erf, gelu_erf(x), dy * gelu_erf_derivative(x))

template <typename T>
__device__ void affine(const MapArguments& to) {
    const f32 scale = to.scale, shift = to.shift;
    map((const T*)to.x, (T*)to.y, to.count, [=](f32 x) -> f32 { return x * scale + shift; });
}
KERNELS(affine, MapArguments)

// Operands with strides of their own, over the same extents.
struct BinaryArguments {
    const void* a;
    const void* b;
    void* y;
    u64 count;
    Strides at_a;
    Strides at_b;
};

template <typename T, typename F>
__device__ __forceinline__ void zip_strided(const BinaryArguments& to, F f) {
    const T *a = (const T*)to.a, *b = (const T*)to.b;
    T* y = (T*)to.y;
    if (to.at_a.is_dense() && to.at_b.is_dense()) {
        zip(a, b, y, to.count, f);
        return;
    }
    u64 first, end;
    if (!Elements{to.count}.template range<T>(first, end)) return;
    for (u64 i = first; i < end; ++i) store(y + i, f(load(a + to.at_a.at(i)), load(b + to.at_b.at(i))));
}

#define BINARY(name, value)                                                     \
    template <typename T>                                                       \
    __device__ void name(const BinaryArguments& to) {                           \
        zip_strided<T>(to, [](f32 a, f32 b) -> f32 { return value; });          \
    }                                                                           \
    KERNELS(name, BinaryArguments)

BINARY(add, a + b)
BINARY(sub, a - b)
BINARY(mul, a * b)
BINARY(div, a / b)

template <typename T>
__device__ void swiglu(const ZipArguments& to) {
    zip((const T*)to.a, (const T*)to.b, (T*)to.y, to.count, [](f32 gate, f32 up) -> f32 { return silu(gate) * up; });
}
KERNELS(swiglu, ZipArguments)

struct SwiGluGradArguments {
    const void* gate;
    const void* up;
    const void* dy;
    void* d_gate;
    void* d_up;
    u64 count;
};

// d_gate may lie over gate, and d_up over up.
template <typename T>
__device__ void swiglu_grad(const SwiGluGradArguments& to) {
    const T *gate = (const T*)to.gate, *up = (const T*)to.up, *dy = (const T*)to.dy;
    T *d_gate = (T*)to.d_gate, *d_up = (T*)to.d_up;
    u64 first, end;
    if (!Elements{to.count}.template range<T>(first, end)) return;
    for (u64 i = first; i < end; ++i) {
        const f32 g = load(gate + i), u = load(up + i), d = load(dy + i);
        store(d_gate + i, d * u * silu_derivative(g));
        store(d_up + i, d * silu(g));
    }
}
KERNELS(swiglu_grad, SwiGluGradArguments)
