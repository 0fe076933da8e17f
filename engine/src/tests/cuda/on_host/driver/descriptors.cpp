// The fake cuBLASLt: creating, setting and destroying descriptors.
#include "descriptors.hpp"

// Attributes of cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t and cublasLtMatmulPreferenceAttributes_t.
const Kind OPERATION = {"operation",
                        {
                            {0, {4, COMPUTE_32F}},  // COMPUTE_TYPE
                            {2, {4, 0}},
                            {3, {4, 0}},
                            {4, {4, 0}},
                            {5, {4, 0}},
                            {6, {4, 2}},  // POINTER_MODE, TRANSA, B, C, FILL_MODE
                            {7, {4, PLAIN}},
                            {8, {8, 0}},
                            {10, {8, 0}},  // EPILOGUE, BIAS_POINTER, BIAS_BATCH_STRIDE
                            {11, {8, 0}},
                            {12, {8, 0}},
                            {13, {8, 0}},
                            {22, {4, -1}},
                            {26, {4, -1}},  // AUX_POINTER, _LD, _BATCH_STRIDE, _DATA_TYPE, BIAS_DATA_TYPE
                        }};
const Kind LAYOUT = {"layout", {{0, {4, 0}}, {1, {4, 0}}, {2, {8, 0}}, {3, {8, 0}}, {4, {8, 0}}, {5, {4, 1}}, {6, {8, 0}}}};
const Kind PREFERENCE = {"preference",
                         {{0, {4, 0}}, {1, {8, 0}}, {3, {4, 7}}, {5, {4, 256}}, {6, {4, 256}}, {7, {4, 256}}, {8, {4, 256}}}};

void* next_handle() {
    static uint64_t last = 0xb1a5'0000'0000;
    return (void*)(last += 16);
}

std::mutex& lock() {
    static std::mutex all;
    return all;
}

static std::map<const void*, std::unique_ptr<Descriptor>>& descriptors() {
    static auto* const all = new std::map<const void*, std::unique_ptr<Descriptor>>;
    return *all;
}

Descriptor* find(const Judged& call, const void* which, const Kind& kind) {
    const auto found = descriptors().find(which);
    if (found != descriptors().end() && found->second->kind == &kind) return found->second.get();
    call.breaks(0, "%p is no %s (any more)", which, kind.what);
    return nullptr;
}

bool fails(const Judged& call) { return double_called(call.name) != 0; }

static int create(const char* name, void** to, const Kind& kind, std::map<int, int64_t> values) {
    const Judged call{name};
    if (fails(call)) return BLAS_ALLOC_FAILED;
    if (to == nullptr) return call.breaks(BLAS_INVALID_VALUE, "nowhere to put it");
    std::unique_lock<std::mutex> locked(lock());
    double_exists(kind.what, 1, false);
    *to = next_handle();
    descriptors()[*to] = std::make_unique<Descriptor>(Descriptor{&kind, std::move(values)});
    return OK;
}

static int destroy(const char* name, void* which, const Kind& kind) {
    const Judged call{name};
    if (fails(call)) return BLAS_ALLOC_FAILED;
    std::unique_lock<std::mutex> locked(lock());
    if (find(call, which, kind) == nullptr) return BLAS_INVALID_VALUE;
    descriptors().erase(which);
    double_exists(kind.what, -1, false);
    return OK;
}

static int set(const char* name, void* which, const Kind& kind, int attribute, const void* from, size_t bytes) {
    const Judged call{name};
    if (fails(call)) return BLAS_ALLOC_FAILED;
    std::unique_lock<std::mutex> locked(lock());
    Descriptor* const descriptor = find(call, which, kind);
    if (descriptor == nullptr) return BLAS_INVALID_VALUE;
    const auto known = kind.attributes.find(attribute);
    if (known == kind.attributes.end()) return call.breaks(BLAS_INVALID_VALUE, "attribute %d", attribute);
    if (from == nullptr || bytes != known->second.first)
        return call.breaks(BLAS_INVALID_VALUE, "attribute %d has %zu bytes, not %zu", attribute, known->second.first, bytes);
    int64_t value = 0;
    if (bytes == 4) {
        int32_t narrow;
        memcpy(&narrow, from, sizeof narrow);
        value = narrow;
    } else {
        memcpy(&value, from, sizeof value);
    }
    descriptor->values[attribute] = value;
    return OK;
}

EXPORTED int cublasLtMatmulDescCreate(void** to, int compute_type, int scale_type) {
    if ((compute_type != COMPUTE_32F && compute_type != COMPUTE_32F_FAST_TF32) || scale_type != F32)
        return Judged{"cublasLtMatmulDescCreate"}.breaks(BLAS_NOT_SUPPORTED, "compute type %d with scale type %d is not modelled",
                                                         compute_type, scale_type);
    return create("cublasLtMatmulDescCreate", to, OPERATION, {{0, compute_type}});
}
EXPORTED int cublasLtMatmulDescDestroy(void* which) { return destroy("cublasLtMatmulDescDestroy", which, OPERATION); }
EXPORTED int cublasLtMatmulDescSetAttribute(void* which, int attribute, const void* from, size_t bytes) {
    return set("cublasLtMatmulDescSetAttribute", which, OPERATION, attribute, from, bytes);
}
EXPORTED int cublasLtMatrixLayoutCreate(void** to, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    return create("cublasLtMatrixLayoutCreate", to, LAYOUT, {{0, type}, {2, int64_t(rows)}, {3, int64_t(columns)}, {4, leading}});
}
EXPORTED int cublasLtMatrixLayoutDestroy(void* which) { return destroy("cublasLtMatrixLayoutDestroy", which, LAYOUT); }
EXPORTED int cublasLtMatrixLayoutSetAttribute(void* which, int attribute, const void* from, size_t bytes) {
    return set("cublasLtMatrixLayoutSetAttribute", which, LAYOUT, attribute, from, bytes);
}
EXPORTED int cublasLtMatmulPreferenceCreate(void** to) { return create("cublasLtMatmulPreferenceCreate", to, PREFERENCE, {}); }
EXPORTED int cublasLtMatmulPreferenceDestroy(void* which) { return destroy("cublasLtMatmulPreferenceDestroy", which, PREFERENCE); }
EXPORTED int cublasLtMatmulPreferenceSetAttribute(void* which, int attribute, const void* from, size_t bytes) {
    return set("cublasLtMatmulPreferenceSetAttribute", which, PREFERENCE, attribute, from, bytes);
}
