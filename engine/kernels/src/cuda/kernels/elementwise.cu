// Functions of each element: y = f(x), y = f(a, b) with broadcast operands, and gated units. Twins: ops/unary.rs,
// ops/binary.rs, ops/affine.rs, ops/swiglu.rs. An output may lie over an operand of the same strides.
#include "elements.cuh"
#include "math.cuh"
#include "strides.cuh"

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

#define UNARY(name)                                                                                             \
    template <typename T>                                                                                       \
    __device__ void unary_##name(const MapArguments& to) {                                                      \
        map((const T*)to.x, (T*)to.y, to.count, [](u64, f32 x) -> f32 { return of_##name(x); });                \
    }                                                                                                           \
    KERNELS(unary_##name, MapArguments)                                                                         \
    template <typename T>                                                                                       \
    __device__ void unary_##name##_grad(const ZipArguments& to) {                                               \
        zip((const T*)to.a, (const T*)to.b, (T*)to.y, to.count,                                                 \
            [](f32 x, f32 dy) -> f32 { return of_##name##_grad(x, dy); });                                      \
    }                                                                                                           \
    KERNELS(unary_##name##_grad, ZipArguments)

UNARY(exp)
UNARY(log)
UNARY(sqr)
UNARY(sqrt)
UNARY(recip)
UNARY(tanh)
UNARY(sigmoid)
UNARY(relu)
UNARY(silu)
UNARY(gelu)
UNARY(gelu_erf)

template <typename T>
__device__ void affine(const MapArguments& to) {
    const f32 scale = to.scale, shift = to.shift;
    map((const T*)to.x, (T*)to.y, to.count, [=](u64, f32 x) -> f32 { return x * scale + shift; });
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
    const Elements<T> own(to.count);
    for (u64 i = own.first; i < own.end; ++i) store(y + i, f(load(a + to.at_a.at(i)), load(b + to.at_b.at(i))));
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
    const Elements<T> own(to.count);
    const auto turn = [](T* gate, T* up, f32 dy) {
        const f32 g = load(gate), u = load(up);
        store(gate, dy * u * silu_derivative(g));
        store(up, dy * silu(g));
    };
    if (own.is_pack(gate, up, dy) && own.is_pack(d_gate, d_up, dy)) {
        Pack<T> of_gate = own.pack(gate), of_up = own.pack(up);
        const Pack<T> of_dy = own.pack(dy);
        for (u32 i = 0; i < Pack<T>::SIZE; ++i) turn(&of_gate.at[i], &of_up.at[i], load(&of_dy.at[i]));
        own.set_pack(d_gate, of_gate);
        own.set_pack(d_up, of_up);
        return;
    }
    for (u64 i = own.first; i < own.end; ++i) {
        T of_gate = gate[i], of_up = up[i];
        turn(&of_gate, &of_up, load(dy + i));
        d_gate[i] = of_gate;
        d_up[i] = of_up;
    }
}
KERNELS(swiglu_grad, SwiGluGradArguments)
