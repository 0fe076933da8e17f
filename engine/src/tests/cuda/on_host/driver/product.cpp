// Computes cublasLtMatmul with simple loops.
#include "product.hpp"

#include <math.h>

// Reads elements. Like initcheck, notes if an element has the bits with which unwritten memory is filled.
struct Reader {
    const char* unwritten = nullptr;

    float operator()(const char* name, uint64_t base, int type, uint64_t index) {
        uint32_t bits;
        if (type == F32) {
            bits = ((const uint32_t*)base)[index];
            if (bits == 0xffffffff) unwritten = name;
        } else {
            const uint16_t half = ((const uint16_t*)base)[index];
            if (half == 0xffff) unwritten = name;
            bits = uint32_t(half) << 16;
        }
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
};

// Rounds to nearest, ties to even.
static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return uint16_t(bits >> 16 | 64);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void write(uint64_t base, int type, uint64_t index, float x) {
    if (type == F32) {
        ((float*)base)[index] = x;
    } else {
        ((uint16_t*)base)[index] = to_bf16(x);
    }
}

// Constants of GELU's tanh approximation (arXiv 1606.08415, section 2).
static const float ROOT = 0.7978845608028654f, CUBIC = 0.044715f;

// Returns tanh with the accuracy of f32, or with that of tanh.approx.f32. The latter has a maximum relative error of
// 2^-11 (PTX ISA, "tanh"), that is, eleven bits.
static float tanh_of(float x) {
    static const bool is_approximate = double_setting("APPROXIMATE_TANH", 0) != 0;
    const float t = tanhf(x);
    if (!is_approximate) return t;
    int exponent;
    const float mantissa = frexpf(t, &exponent);
    return ldexpf(nearbyintf(ldexpf(mantissa, 11)), exponent - 11);
}

static float gelu(float x) { return 0.5f * x * (1 + tanh_of(ROOT * (x + CUBIC * x * x * x))); }

static float gelu_gradient(float x) {
    const float t = tanh_of(ROOT * (x + CUBIC * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * ROOT * (1 + 3 * CUBIC * x * x);
}

// Rounds to TF32: to nearest with 10 bits of mantissa, ties to even. The documentation does not say how a device rounds.
static float to_tf32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x - x != 0) return x;
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

std::string compute(const Product& product) {
    const Matrix &a = product.a, &b = product.b, &c = product.c, &d = product.d;
    const uint64_t inner = product.is_a_transposed ? a.rows : a.columns;
    Reader read;
    // The workspace is overwritten, because its content is undefined after a product.
    if (product.workspace_bytes > 0) memset((void*)product.workspace, 0xff, product.workspace_bytes);
    for (uint64_t batch = 0; batch < uint64_t(d.batch); ++batch) {
        const uint64_t to_a = batch * uint64_t(a.stride), to_b = batch * uint64_t(b.stride), to_c = batch * uint64_t(c.stride),
                       to_d = batch * uint64_t(d.stride);
        for (uint64_t column = 0; column < d.columns; ++column) {
            for (uint64_t row = 0; row < d.rows; ++row) {
                float sum = 0;
                for (uint64_t i = 0; i < inner; ++i) {
                    const uint64_t of_a = product.is_a_transposed ? row * uint64_t(a.leading) + i : i * uint64_t(a.leading) + row;
                    const uint64_t of_b =
                        product.is_b_transposed ? i * uint64_t(b.leading) + column : column * uint64_t(b.leading) + i;
                    const float factors[2] = {read("A", product.at_a, a.type, to_a + of_a), read("B", product.at_b, b.type, to_b + of_b)};
                    sum += product.is_tf32 ? to_tf32(factors[0]) * to_tf32(factors[1]) : factors[0] * factors[1];
                }
                float x = product.alpha * sum;
                // C is not read if beta is 0, because it may contain NaN.
                if (product.beta != 0) x += product.beta * read("C", product.at_c, c.type, to_c + column * uint64_t(c.leading) + row);
                if (product.epilogue & BIAS) x += read("bias", product.bias, d.type, batch * uint64_t(product.bias_stride) + row);
                const uint64_t of_aux = batch * uint64_t(product.aux_stride) + column * uint64_t(product.aux_leading) + row;
                if (product.epilogue & GELU_GRADIENT) {
                    x *= gelu_gradient(read("aux", product.aux, d.type, of_aux));
                } else if (product.epilogue & AUX) {
                    write(product.aux, d.type, of_aux, x);
                }
                if (product.epilogue & GELU) x = gelu(x);
                write(product.at_d, d.type, to_d + column * uint64_t(d.leading) + row, x);
            }
        }
    }
    return read.unwritten == nullptr ? "" : std::string("reads ") + read.unwritten + ", to which nobody has written";
}
