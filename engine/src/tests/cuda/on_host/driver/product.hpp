// A product of cuBLASLt as its documentation defines it, with every address and layout known.
#pragma once

#include "double.hpp"

// Values of cudaDataType in library_types.h.
enum Type : int { F32 = 0, F64 = 1, F16 = 2, I8 = 3, BF16 = 14 };

// Values of cublasLtEpilogue_t: flags and their combinations.
enum Epilogue : unsigned {
    PLAIN = 1,
    BIAS = 4,
    GELU = 32,
    GELU_GRADIENT = 64,
    AUX = 128,
};

// A column-major matrix.
struct Matrix {
    int type;
    uint64_t rows, columns;
    int64_t leading;
    int order;
    int batch;
    int64_t stride;

    bool operator==(const Matrix& other) const {
        return type == other.type && rows == other.rows && columns == other.columns && leading == other.leading &&
               order == other.order && batch == other.batch && stride == other.stride;
    }

    uint64_t element() const { return type == F64 ? 8 : type == F32 ? 4 : type == I8 ? 1 : 2; }
    // Returns the number of elements from the first to the last.
    uint64_t extent() const { return uint64_t(batch - 1) * uint64_t(stride) + (columns - 1) * uint64_t(leading) + rows; }
    uint64_t bytes() const { return extent() * element(); }
};

struct Product {
    Matrix a, b, c, d;
    bool is_a_transposed, is_b_transposed;
    // True if A and B are rounded to TF32.
    bool is_tf32;
    uint64_t at_a, at_b, at_c, at_d;
    float alpha, beta;
    unsigned epilogue;
    uint64_t bias, aux;
    int64_t bias_stride, aux_leading, aux_stride;
    uint64_t workspace, workspace_bytes;
};

// Computes D = epilogue(alpha · op(A) · op(B) + beta · C + bias), summed in f32. Returns an error text, which is
// empty if there is no error.
std::string compute(const Product& product);
