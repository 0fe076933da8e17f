// The fake cuBLASLt: checks the rules by which descriptors define a product.
#include <algorithm>
#include <set>
#include <tuple>

#include "descriptors.hpp"

enum : int { TRANSPOSED = 1 };

// Bytes of device memory that the first product takes.
static constexpr int64_t LIBRARY_BYTES = 32 << 20;

struct Handle {
    bool is_started = false;
    // The algorithms that have been started, as pairs of a product's form and an algorithm's index. Each has code of
    // its own.
    std::set<std::pair<uint64_t, uint64_t>> started;
};

// An algorithm that was chosen for a product, in the eight 64-bit words of the public struct.
struct Algorithm {
    uint64_t magic, problem, workspace_bytes, alignments;
    uint64_t beside[2];
    // The algorithm's index among the algorithms that were returned.
    uint64_t index;
    uint64_t unused;
};
// Maximum number of algorithms that are returned for a product.
static constexpr int MOST_ANSWERS = 3;
static constexpr uint64_t MAGIC = 0x646f75626c656c74;

struct Found {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Algorithm) == 64 && sizeof(Found) == 96, "as in cublasLt.h");

static std::map<const void*, std::unique_ptr<Handle>>& handles() {
    static auto* const all = new std::map<const void*, std::unique_ptr<Handle>>;
    return *all;
}

EXPORTED int cublasLtCreate(void** handle) {
    const Judged call{"cublasLtCreate"};
    if (fails(call)) return BLAS_ALLOC_FAILED;
    if (handle == nullptr) return call.breaks(BLAS_INVALID_VALUE, "nowhere to put it");
    if (double_enter(call.name, true) != 0) return BLAS_NOT_INITIALIZED;
    double_exists("cuBLASLt", 1, true);
    std::unique_lock<std::mutex> locked(lock());
    *handle = next_handle();
    handles()[*handle] = std::make_unique<Handle>();
    return OK;
}

EXPORTED int cublasLtDestroy(void* handle) {
    const Judged call{"cublasLtDestroy"};
    if (fails(call)) return BLAS_ALLOC_FAILED;
    if (double_enter(call.name, true) != 0) return BLAS_NOT_INITIALIZED;
    std::unique_lock<std::mutex> locked(lock());
    const auto found = handles().find(handle);
    if (found == handles().end()) return call.breaks(BLAS_NOT_INITIALIZED, "%p is no handle (any more)", handle);
    if (found->second->is_started) double_take(-LIBRARY_BYTES);
    handles().erase(found);
    double_exists("cuBLASLt", -1, true);
    return OK;
}

static Matrix matrix_of(const Descriptor& layout) {
    return {int(layout[0]), uint64_t(layout[2]), uint64_t(layout[3]), layout[4], int(layout[1]), int(layout[5]), layout[6]};
}

// Checks a single matrix.
static int judge(const Judged& call, const char* name, const Matrix& matrix) {
    if (matrix.order != 0) return call.breaks(BLAS_NOT_SUPPORTED, "%s: order %d is not modelled", name, matrix.order);
    if (matrix.rows == 0 || matrix.columns == 0)
        return call.breaks(BLAS_INVALID_VALUE, "%s is %llu × %llu", name, (unsigned long long)matrix.rows,
                           (unsigned long long)matrix.columns);
    if (matrix.leading < int64_t(matrix.rows))
        return call.breaks(BLAS_INVALID_VALUE, "%s: its leading dimension, %lld, is less than its %llu rows", name,
                           (long long)matrix.leading, (unsigned long long)matrix.rows);
    if (matrix.batch < 1 || matrix.stride < 0)
        return call.breaks(BLAS_INVALID_VALUE, "%s: a batch of %d, %lld apart", name, matrix.batch, (long long)matrix.stride);
    return OK;
}

// Checks types against the documentation's table for compute type 32F and scale type 32F. `factors` is the type of A
// and B, and `result` that of C and D.
static bool is_in_table(int factors, int result, unsigned epilogue) {
    if (factors == I8) return result == F32 && epilogue == PLAIN;
    return (factors == BF16 || factors == F16 || factors == F32) && (result == factors || result == F32);
}

// Reads and checks all descriptors that are passed to a heuristic.
static int judge(const Judged& call, const Descriptor& operation, Product& product) {
    struct Named {
        const char* name;
        const Matrix& matrix;
    };
    for (const Named& each : {Named{"A", product.a}, Named{"B", product.b}, Named{"C", product.c}, Named{"D", product.d}}) {
        if (const int status = judge(call, each.name, each.matrix)) return status;
        if (each.matrix.batch != product.d.batch)
            return call.breaks(BLAS_INVALID_VALUE, "a batch of %d %s and %d D", each.matrix.batch, each.name, product.d.batch);
    }
    const auto& [a, b, c, d] = std::tie(product.a, product.b, product.c, product.d);
    if (d.batch > 1 && uint64_t(d.stride) < (d.columns - 1) * uint64_t(d.leading) + d.rows)
        return call.breaks(BLAS_INVALID_VALUE, "the D of a batch overlap");
    for (int attribute : {3, 4}) {
        if (operation[attribute] != 0 && operation[attribute] != TRANSPOSED)
            return call.breaks(BLAS_INVALID_VALUE, "transposition %lld", (long long)operation[attribute]);
    }
    if (operation[2] != 0 || operation[5] != 0 || operation[6] != 2)
        return call.breaks(BLAS_NOT_SUPPORTED, "pointer mode, transposition of C or fill mode are not modelled");
    product.is_a_transposed = operation[3] == TRANSPOSED;
    product.is_b_transposed = operation[4] == TRANSPOSED;
    const uint64_t rows = product.is_a_transposed ? a.columns : a.rows, inner_a = product.is_a_transposed ? a.rows : a.columns;
    const uint64_t columns = product.is_b_transposed ? b.rows : b.columns, inner_b = product.is_b_transposed ? b.columns : b.rows;
    if (inner_a != inner_b || d.rows != rows || d.columns != columns) {
        return call.breaks(BLAS_INVALID_VALUE, "%llu × %llu times %llu × %llu is no %llu × %llu", (unsigned long long)rows,
                           (unsigned long long)inner_a, (unsigned long long)inner_b, (unsigned long long)columns,
                           (unsigned long long)d.rows, (unsigned long long)d.columns);
    }
    if (c.rows != d.rows || c.columns != d.columns || c.type != d.type)
        return call.breaks(BLAS_INVALID_VALUE, "C and D are of different sizes or types");
    product.epilogue = unsigned(operation[7]);
    if (a.type != b.type || !is_in_table(a.type, d.type, product.epilogue))
        return call.breaks(BLAS_NOT_SUPPORTED, "types %d, %d and %d with epilogue %u", a.type, b.type, d.type, product.epilogue);
    const std::map<unsigned, bool> modelled = {{PLAIN, true},
                                               {BIAS, true},
                                               {GELU, true},
                                               {GELU | BIAS, true},
                                               {GELU | AUX, true},
                                               {GELU | AUX | BIAS, true},
                                               {GELU_GRADIENT | AUX, true}};
    if (modelled.count(product.epilogue) == 0 || a.type == I8 || a.type == F16)
        return call.breaks(BLAS_NOT_SUPPORTED, "epilogue %u or type %d is not modelled", product.epilogue, a.type);
    if (product.epilogue == PLAIN) return OK;
    product.bias = uint64_t(operation[8]), product.bias_stride = operation[10];
    product.aux = uint64_t(operation[11]), product.aux_leading = operation[12], product.aux_stride = operation[13];
    for (int attribute : {22, 26}) {
        if (operation[attribute] != -1 && operation[attribute] != d.type)
            return call.breaks(BLAS_NOT_SUPPORTED, "bias or aux of type %lld beside D of %d", (long long)operation[attribute],
                               d.type);
    }
    if (product.epilogue & AUX) {
        if (product.aux_leading % 8 != 0 || product.aux_leading < int64_t(d.rows))
            return call.breaks(BLAS_INVALID_VALUE, "aux: leading dimension %lld of %llu rows", (long long)product.aux_leading,
                               (unsigned long long)d.rows);
        if (d.batch > 1 && (product.aux_stride % 8 != 0 || product.aux_stride < product.aux_leading * int64_t(d.columns)))
            return call.breaks(BLAS_INVALID_VALUE, "aux: %lld from one of a batch to the next", (long long)product.aux_stride);
    }
    return OK;
}

// Returns a hash of everything that an algorithm depends on (FNV-1a).
static uint64_t problem_of(const Product& product) {
    uint64_t hash = 0xcbf29ce484222325;
    const auto mix = [&](uint64_t x) {
        for (int i = 0; i < 8; ++i, x >>= 8) hash = (hash ^ (x & 255)) * 0x100000001b3;
    };
    for (const Matrix* matrix : {&product.a, &product.b, &product.c, &product.d}) {
        for (uint64_t x : {uint64_t(matrix->type), matrix->rows, matrix->columns, uint64_t(matrix->leading),
                           uint64_t(matrix->batch), uint64_t(matrix->stride)})
            mix(x);
    }
    for (uint64_t x : {uint64_t(product.is_a_transposed), uint64_t(product.is_b_transposed), uint64_t(product.is_tf32),
                       uint64_t(product.epilogue), uint64_t(product.aux_leading)})
        mix(x);
    return hash;
}

static bool read_descriptors(const Judged& call, const void* operation, const void* const (&layouts)[4], Product& product,
                             int& status) {
    const Descriptor* const described = find(call, operation, OPERATION);
    Matrix* const to[4] = {&product.a, &product.b, &product.c, &product.d};
    status = described == nullptr ? BLAS_INVALID_VALUE : OK;
    for (int i = 0; i < 4; ++i) {
        const Descriptor* const layout = find(call, layouts[i], LAYOUT);
        if (layout == nullptr) status = BLAS_INVALID_VALUE;
        if (status == OK) *to[i] = matrix_of(*layout);
    }
    if (status == OK) status = judge(call, *described, product);
    product.is_tf32 = status == OK && (*described)[0] == COMPUTE_32F_FAST_TF32;
    // In the documentation's table, all matrices of this compute type are f32.
    if (product.is_tf32 && (product.a.type != F32 || product.b.type != F32 || product.c.type != F32 || product.d.type != F32))
        status = call.breaks(BLAS_NOT_SUPPORTED, "TF32 with matrices that are not f32");
    return status == OK;
}

// Returns the alignment of an address: its lowest set bit, but at most 256.
static uint64_t alignment_of(uint64_t address) { return address == 0 ? 256 : std::min<uint64_t>(256, address & -address); }

EXPORTED int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference,
                                            int asked, Found* found, int* count) {
    const Judged call{"cublasLtMatmulAlgoGetHeuristic"};
    if (fails(call)) return BLAS_ALLOC_FAILED;
    if (double_enter(call.name, false) != 0) return BLAS_NOT_INITIALIZED;
    std::unique_lock<std::mutex> locked(lock());
    if (handles().count(handle) == 0) return call.breaks(BLAS_NOT_INITIALIZED, "%p is no handle (any more)", handle);
    if (asked <= 0 || found == nullptr || count == nullptr) return call.breaks(BLAS_INVALID_VALUE, "%d algorithms", asked);
    *count = 0;
    Product product = {};
    int status;
    if (!read_descriptors(call, operation, {a, b, c, d}, product, status)) return status;
    const Descriptor* const preferred = find(call, preference, PREFERENCE);
    if (preferred == nullptr) return BLAS_INVALID_VALUE;
    uint64_t alignments = 0;
    for (int attribute : {5, 6, 7, 8}) {
        const int64_t alignment = (*preferred)[attribute];
        if (alignment <= 0 || (alignment & (alignment - 1)) != 0)
            return call.breaks(BLAS_INVALID_VALUE, "an alignment of %lld", (long long)alignment);
        alignments = alignments << 16 | uint64_t(std::min<int64_t>(alignment, 256));
    }
    if (((*preferred)[3] & ~7) != 0) return call.breaks(BLAS_INVALID_VALUE, "reduction schemes %lld", (long long)(*preferred)[3]);
    if ((product.epilogue & (GELU | GELU_GRADIENT)) != 0 && double_setting("HAS_NO_EPILOGUES", 0) != 0) return BLAS_NOT_SUPPORTED;
    for (const auto& [flag, pointer] : {std::pair(BIAS, product.bias), std::pair(AUX, product.aux)}) {
        // The heuristic uses the address to determine its alignment.
        if ((product.epilogue & flag) != 0 && pointer == 0)
            return call.breaks(BLAS_INVALID_VALUE, "no address of %s", flag == BIAS ? "the bias" : "aux");
    }
    // An algorithm needs some of the allowed workspace; how much depends on the form of the product. If partial sums in
    // the workspace are forbidden, it needs none.
    const uint64_t problem = problem_of(product), most = uint64_t((*preferred)[1]);
    const uint64_t workspace = ((*preferred)[3] & 6) == 0 ? 0 : std::min<uint64_t>(most, (problem % 5) << 14);
    for (; *count < std::min(asked, MOST_ANSWERS); ++*count) {
        const uint64_t beside[2] = {alignment_of(product.bias), alignment_of(product.aux)};
        const Algorithm algorithm = {MAGIC, problem, workspace, alignments, {beside[0], beside[1]}, uint64_t(*count), 0};
        found[*count] = {algorithm, workspace, OK, 1, {}};
    }
    return OK;
}

EXPORTED size_t cublasLtGetVersion() { return 130100; }

// Tile, split of the sum, and stages.
EXPORTED int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int attribute, void* to, size_t bytes,
                                                  size_t* written) {
    const Judged call{"cublasLtMatmulAlgoConfigGetAttribute"};
    if (algorithm == nullptr || algorithm->magic != MAGIC) return call.breaks(BLAS_INVALID_VALUE, "no algorithm of this library");
    if (attribute != 1 && attribute != 2 && attribute != 6) return call.breaks(BLAS_NOT_SUPPORTED, "attribute %d", attribute);
    if (to == nullptr || bytes != sizeof(uint32_t)) return call.breaks(BLAS_INVALID_VALUE, "%zu bytes for an attribute", bytes);
    *static_cast<uint32_t*>(to) = uint32_t(algorithm->index + 1);
    if (written != nullptr) *written = sizeof(uint32_t);
    return OK;
}

static bool overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

EXPORTED int cublasLtMatmul(void* handle, void* operation, const float* alpha, const void* a, void* a_layout, const void* b,
                            void* b_layout, const float* beta, const void* c, void* c_layout, void* d, void* d_layout,
                            const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
    const Judged call{"cublasLtMatmul"};
    if (fails(call)) return BLAS_ALLOC_FAILED;
    std::unique_lock<std::mutex> locked(lock());
    const auto found = handles().find(handle);
    if (found == handles().end()) return call.breaks(BLAS_NOT_INITIALIZED, "%p is no handle (any more)", handle);
    if (double_enter(call.name, false) != 0) return BLAS_EXECUTION_FAILED;
    Product product = {};
    int status;
    if (!read_descriptors(call, operation, {a_layout, b_layout, c_layout, d_layout}, product, status)) return status;
    // The first start of an algorithm may load code, which is forbidden while a stream is capturing.
    const uint64_t index = algorithm == nullptr ? 0 : algorithm->index;
    const bool is_first = found->second->started.insert({problem_of(product), index}).second;
    if (is_first && double_enter(call.name, true) != 0) return BLAS_EXECUTION_FAILED;
    if (!found->second->is_started && double_take(LIBRARY_BYTES) != 0) return BLAS_ALLOC_FAILED;
    found->second->is_started = true;
    if (alpha == nullptr || beta == nullptr) return call.breaks(BLAS_INVALID_VALUE, "no alpha or no beta");
    product.alpha = *alpha, product.beta = *beta;
    product.at_a = uint64_t(a), product.at_b = uint64_t(b), product.at_c = uint64_t(c), product.at_d = uint64_t(d);
    if (algorithm == nullptr || algorithm->magic != MAGIC || algorithm->problem != problem_of(product))
        return call.breaks(BLAS_INVALID_VALUE, "the algorithm is for another product");
    product.workspace = uint64_t(workspace), product.workspace_bytes = algorithm->workspace_bytes;
    if (workspace_bytes < algorithm->workspace_bytes)
        return call.breaks(BLAS_INVALID_VALUE, "a workspace of %zu bytes, and the algorithm needs %llu", workspace_bytes,
                           (unsigned long long)algorithm->workspace_bytes);
    if (workspace_bytes > 0 && (product.workspace % 256 != 0 || !double_is_accessible(product.workspace, workspace_bytes)))
        return call.breaks(BLAS_INVALID_VALUE, "the workspace is not aligned to 256 bytes, or not accessible");
    const uint64_t bias_bytes =
        product.epilogue & BIAS
            ? (uint64_t(product.d.batch - 1) * uint64_t(product.bias_stride) + product.d.rows) * product.d.element()
            : 0;
    const uint64_t aux_bytes = product.epilogue & AUX ? (uint64_t(product.d.batch - 1) * uint64_t(product.aux_stride) +
                                                         (product.d.columns - 1) * uint64_t(product.aux_leading) + product.d.rows) *
                                                            product.d.element()
                                                      : 0;
    struct Operand {
        const char* name;
        uint64_t address, bytes, element, alignment;
    };
    const auto promised = [&](int which) { return algorithm->alignments >> (48 - 16 * which) & 0xffff; };
    const Operand operands[] = {
        {"A", product.at_a, product.a.bytes(), product.a.element(), promised(0)},
        {"B", product.at_b, product.b.bytes(), product.b.element(), promised(1)},
        {"C", product.at_c, product.c.bytes(), product.c.element(), promised(2)},
        {"D", product.at_d, product.d.bytes(), product.d.element(), promised(3)},
        {"bias", product.bias, bias_bytes, product.d.element(), algorithm->beside[0]},
        {"aux", product.aux, aux_bytes, product.d.element(), algorithm->beside[1]},
    };
    for (const Operand& operand : operands) {
        if (operand.bytes == 0) continue;
        const uint64_t least = std::max(operand.alignment, operand.element);
        if (operand.address % least != 0)
            return call.breaks(BLAS_INVALID_VALUE, "%s is at %#llx, and was said to be aligned to %llu", operand.name,
                               (unsigned long long)operand.address, (unsigned long long)least);
        if (!double_is_accessible(operand.address, operand.bytes))
            return call.breaks(BLAS_INVALID_VALUE, "%s, %llu bytes at %#llx, is not all accessible", operand.name,
                               (unsigned long long)operand.bytes, (unsigned long long)operand.address);
        if (overlap(operand.address, operand.bytes, product.workspace, product.workspace_bytes))
            return call.breaks(BLAS_INVALID_VALUE, "%s lies in the workspace", operand.name);
        const bool is_in_place = operand.name[0] == 'C' && operand.address == product.at_d;
        if (is_in_place && !(product.c == product.d)) return call.breaks(BLAS_INVALID_VALUE, "C is D, with another layout");
        if (!is_in_place && operand.name[0] != 'D' && overlap(operand.address, operand.bytes, product.at_d, product.d.bytes()))
            return call.breaks(BLAS_INVALID_VALUE, "%s lies over D", operand.name);
    }
    const Work work = {"cublasLtMatmul", [product] { return compute(product); }};
    return double_enqueue(call.name, stream, &work) == 0 ? OK : BLAS_EXECUTION_FAILED;
}
