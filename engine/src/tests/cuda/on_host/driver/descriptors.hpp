// Descriptors of the fake cuBLASLt: attributes by number.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "product.hpp"

// cublasStatus_t.
enum Status : int {
    OK = 0,
    BLAS_NOT_INITIALIZED = 1,
    BLAS_ALLOC_FAILED = 3,
    BLAS_INVALID_VALUE = 7,
    BLAS_EXECUTION_FAILED = 13,
    BLAS_NOT_SUPPORTED = 15,
};

// cublasComputeType_t: products in f32, and products of f32 values that are rounded to TF32.
enum : int { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };

// The kind of a descriptor: the size and the default value of each attribute.
struct Kind {
    const char* what;
    std::map<int, std::pair<size_t, int64_t>> attributes;
};

extern const Kind OPERATION, LAYOUT, PREFERENCE;

struct Descriptor {
    const Kind* kind;
    std::map<int, int64_t> values;
    int64_t operator[](int attribute) const {
        const auto found = values.find(attribute);
        return found != values.end() ? found->second : kind->attributes.at(attribute).second;
    }
};

// Returns a handle that was never returned before, so that the use of a destroyed handle is detected.
void* next_handle();

// Returns the lock that is held during every access to an object of cuBLASLt.
std::mutex& lock();

// Returns the descriptor. If the handle is invalid, reports a broken rule and returns null.
Descriptor* find(const Judged& call, const void* which, const Kind& kind);

// True if a test has made this call fail, as if memory were missing.
bool fails(const Judged& call);
