// Descriptors of cuBLASLt: attributes by their numbers.
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

enum : int { COMPUTE_32F = 68 };

// What a descriptor is of: the size of each attribute, and what it is until it is set.
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

// A handle that was never given before, so that what was destroyed is known as such.
void* next_handle();

// Held while any object of cuBLASLt is looked at.
std::mutex& lock();

// The descriptor; or nothing, and the call breaks a rule.
Descriptor* find(const Judged& call, const void* which, const Kind& kind);

// Whether a call is to fail: as if for want of memory.
bool fails(const Judged& call);
