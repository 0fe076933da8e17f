// AdamW with eight-bit moments. CPU counterparts: optim/adamw8bit.rs and, for the codes, optim/eight_bit.rs.
#include "reduce.cuh"

struct AdamW8bitArguments {
    void* parameter;
    const void* gradient;
    // The codes of the moments, and one scale per SHARING elements.
    u8* m;
    u8* v;
    f32* m_scales;
    f32* v_scales;
    const f32* norm;
    // Learning rate, 1 - beta1^t and 1 - beta2^t, where t is the step's number.
    const f32* scalars;
    u64 count;
    f32 max_norm;
    f32 beta1;
    f32 beta2;
    f32 eps;
    f32 decay;
};

// Number of elements that share a scale. A warp updates them together.
constexpr u32 SHARING = 256;
constexpr u32 OWN = SHARING / 32;

// The greatest value of a code, in multiples of the scale. Blocks below LEAST_SCALED are stored as zeros.
constexpr f32 GREATEST = 1.875f;
constexpr f32 LEAST_SCALED = 1e-37f;

// A code has 3 bits of mantissa, below EXPONENTS exponents. The greatest exponent stands for 2^0. The values of exponent
// 0 are evenly spaced.
constexpr u32 DROPPED = 20;

template <u32 EXPONENTS>
struct Code {
    static constexpr u32 BIAS = 127 - (EXPONENTS - 1);

    // 2^(EXPONENTS + 1), the code of an evenly spaced value divided by the value.
    __device__ __forceinline__ static f32 even_scale() { return __uint_as_float((127 + EXPONENTS + 1) << 23); }

    // Returns the code nearest to x, for 0 <= x <= GREATEST.
    __device__ __forceinline__ static u32 encode(f32 x) {
        const u32 bits = bits_of(x), nearest = (bits + (1u << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1)) >> DROPPED;
        // Adding 2^23 rounds to an integer and leaves it in the low bits.
        if (bits >> 23 <= BIAS) return bits_of(x * even_scale() + 8388608.0f) & 0xffu;
        return nearest - (BIAS << 3);
    }

    __device__ __forceinline__ static f32 decode(u32 code) {
        return code < 8 ? f32(code) / even_scale() : __uint_as_float((code + (BIAS << 3)) << DROPPED);
    }
};

using Signed = Code<16>;
using Unsigned = Code<32>;

template <typename T>
__device__ void adamw_8bit(const AdamW8bitArguments& to) {
    const f32 norm = *to.norm;
    const u64 group = global_thread() / 32, first = group * SHARING + lane_of();
    // If the norm is not finite, the step is skipped and the model does not change.
    if (group * SHARING >= to.count || !(norm - norm == 0.0f)) return;
    const f32 lr = to.scalars[0], clip = fminf(to.max_norm / (norm + 1e-6f), 1.0f);
    const f32 keep = 1.0f - lr * to.decay, step = lr / to.scalars[1], root = 1.0f / sqrtf(to.scalars[2]);
    const f32 m_scale = to.m_scales[group], v_scale = to.v_scales[group];
    f32 m[OWN], v[OWN], most_m = 0.0f, most_v = 0.0f;
#pragma unroll
    for (u32 j = 0; j < OWN; ++j) {
        const u64 i = first + 32 * j;
        m[j] = v[j] = 0.0f;
        if (i >= to.count) continue;
        const u32 code = to.m[i];
        const f32 magnitude = Signed::decode(code & 0x7fu) * m_scale;
        const f32 g = load((const T*)to.gradient + i) * clip;
        m[j] = to.beta1 * (code & 0x80u ? -magnitude : magnitude) + (1.0f - to.beta1) * g;
        v[j] = to.beta2 * (Unsigned::decode(to.v[i]) * v_scale) + (1.0f - to.beta2) * g * g;
        T* parameter = (T*)to.parameter + i;
        store(parameter, load(parameter) * keep - step * m[j] / (sqrtf(v[j]) * root + to.eps));
        most_m = fmaxf(most_m, fabsf(m[j]));
        most_v = fmaxf(most_v, v[j]);
    }
    most_m = fold_lanes<Max>(most_m, 32);
    most_v = fold_lanes<Max>(most_v, 32);
    const f32 of_m = most_m >= LEAST_SCALED ? GREATEST / most_m : 0.0f;
    const f32 of_v = most_v >= LEAST_SCALED ? GREATEST / most_v : 0.0f;
#pragma unroll
    for (u32 j = 0; j < OWN; ++j) {
        const u64 i = first + 32 * j;
        if (i >= to.count) continue;
        const u32 sign = bits_of(m[j]) >> 31 << 7, code = Unsigned::encode(fminf(v[j] * of_v, GREATEST));
        to.m[i] = u8(sign | Signed::encode(fminf(fabsf(m[j]) * of_m, GREATEST)));
        // A second moment never becomes zero, because it is a divisor.
        to.v[i] = u8(code == 0 ? 1 : code);
    }
    if (lane_of() == 0) {
        to.m_scales[group] = most_m >= LEAST_SCALED ? most_m / GREATEST : 0.0f;
        to.v_scales[group] = most_v >= LEAST_SCALED ? most_v / GREATEST : 0.0f;
    }
}
KERNELS(adamw_8bit, AdamW8bitArguments)
