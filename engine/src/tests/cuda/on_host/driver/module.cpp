// The fake driver: code and launches. A kernel is a function, defined by device.hpp, that runs all blocks.
#include <dlfcn.h>
#include <unistd.h>

#include "state.hpp"

// The same layout as Run in device.hpp.
struct Run {
    unsigned grid[3];
    unsigned block;
    unsigned shared_bytes;
    unsigned is_reversed;
};

// Values of CU_FUNC_ATTRIBUTE_NUM_REGS and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
static constexpr int NUM_REGS = 4, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
// The first driver version that has cuFuncLoad.
static constexpr uint64_t FIRST_WITH_LOAD = 12040;
// Bytes of shared memory that a block may use unless the function's attribute allows more.
static constexpr int SHARED_BYTES = 48 << 10;
// The programming guide's limit on a kernel's parameters before CUDA 12.1.
static constexpr uint64_t PARAMETER_BYTES = 4096;
// Bytes of device memory that code takes: for a module, and for each function once it is loaded (CUDA_MODULE_LOADING
// is LAZY).
static constexpr uint64_t MODULE_BYTES = 256 << 10, FUNCTION_BYTES = 64 << 10;

EXPORTED int cuModuleLoadData(void** module, const void* image) {
    const Call call("cuModuleLoadData", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    if (module == nullptr || image == nullptr) return call.breaks(INVALID_VALUE, "no image");
    const Binary* const binary = (const Binary*)image;
    if (memcmp(binary->magic, Binary::MAGIC, sizeof binary->magic) != 0)
        return call.breaks(INVALID_IMAGE, "not compiled by the double of NVRTC");
    // Code runs on devices of the same major version that are not older. Architecture-specific code (sm_90a) only
    // runs on its own architecture.
    const unsigned ours = unsigned(architecture()), theirs = binary->architecture;
    if (binary->is_specific ? ours != theirs : ours / 10 != theirs / 10 || ours < theirs)
        return call.breaks(NO_BINARY_FOR_GPU, "code of sm_%u on sm_%u", theirs, ours);
    if (!take(MODULE_BYTES)) return OUT_OF_MEMORY;
    // The file name must be unique, because the loader identifies libraries by name.
    const char* const temporary = getenv("TMPDIR");
    std::string path = std::string(temporary == nullptr ? "/tmp" : temporary) + "/double-of-code-XXXXXX";
    const int file = mkstemp(path.data());
    const char* at = (const char*)(binary + 1);
    for (uint64_t left = binary->bytes; left > 0;) {
        const ssize_t written = write(file, at, left);
        if (written <= 0) abort();
        at += written;
        left -= uint64_t(written);
    }
    close(file);
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    unlink(path.c_str());
    if (library == nullptr) return call.breaks(INVALID_IMAGE, "%s", dlerror());
    *module = state().modules.add(Module{call.context, library});
    return SUCCESS;
}

EXPORTED int cuModuleUnload(void* handle) {
    const Call call("cuModuleUnload", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    const Module* const module = state().modules.find(call, handle);
    if (module == nullptr) return INVALID_VALUE;
    auto& functions = state().functions.all;
    for (auto at = functions.begin(); at != functions.end();) {
        const bool is_of_it = at->second->module == handle;
        if (is_of_it && at->second->is_loaded) give(FUNCTION_BYTES);
        at = is_of_it ? functions.erase(at) : std::next(at);
    }
    dlclose(module->library);
    state().modules.remove(call, handle);
    give(MODULE_BYTES);
    return SUCCESS;
}

EXPORTED int cuModuleGetFunction(void** function, void* handle, const char* name) {
    const Call call("cuModuleGetFunction", CONTEXT);
    if (call.refused) return call.refused;
    const Module* const module = state().modules.find(call, handle);
    if (module == nullptr || function == nullptr || name == nullptr) return INVALID_VALUE;
    Function made{handle, name, nullptr, 0, SHARED_BYTES};
    made.entry = (decltype(made.entry))dlsym(module->library, name);
    const auto bytes = (unsigned long long (*)())dlsym(module->library, (made.name + "_bytes").c_str());
    if (made.entry == nullptr || bytes == nullptr) return call.breaks(NOT_FOUND, "the module has no kernel %s", name);
    made.bytes = bytes();
    *function = state().functions.add(std::move(made));
    return SUCCESS;
}

static int load(Function& function) {
    if (!function.is_loaded && !take(FUNCTION_BYTES)) return OUT_OF_MEMORY;
    function.is_loaded = true;
    return SUCCESS;
}

EXPORTED int cuFuncLoad(void* handle) {
    const Call call("cuFuncLoad", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    if (double_setting("VERSION", 13000) < FIRST_WITH_LOAD) return call.breaks(NOT_FOUND, "not in this version of the driver");
    Function* const function = state().functions.find(call, handle);
    return function == nullptr ? INVALID_HANDLE : load(*function);
}

// Loads the function, because its attributes are only available once it is loaded.
EXPORTED int cuFuncGetAttribute(int* value, int attribute, void* handle) {
    const Call call("cuFuncGetAttribute", CONTEXT | SAFE);
    if (call.refused) return call.refused;
    Function* const function = state().functions.find(call, handle);
    if (function == nullptr) return INVALID_HANDLE;
    if (value == nullptr || attribute != NUM_REGS) return call.breaks(INVALID_VALUE, "attribute %d", attribute);
    *value = 32;
    return load(*function);
}

EXPORTED int cuFuncSetAttribute(void* handle, int attribute, int value) {
    const Call call("cuFuncSetAttribute", CONTEXT);
    if (call.refused) return call.refused;
    Function* const function = state().functions.find(call, handle);
    if (function == nullptr) return INVALID_HANDLE;
    if (attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES) return call.breaks(INVALID_VALUE, "attribute %d", attribute);
    if (value < 0 || value > most_shared_bytes())
        return call.breaks(INVALID_VALUE, "%d bytes of shared memory, and the device has %d", value, most_shared_bytes());
    function->most_dynamic = value;
    return SUCCESS;
}

EXPORTED int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra) {
    const Call call("cuLaunchKernel", CONTEXT);
    if (call.refused) {
        invalidate(stream);
        return call.refused;
    }
    Function* const function = state().functions.find(call, handle);
    if (function == nullptr) return INVALID_HANDLE;
    const char* const name = function->name.c_str();
    if (!function->is_loaded && is_capturing(stream)) {
        invalidate(stream);
        return call.breaks(CAPTURE_UNSUPPORTED, "%s: would be loaded while the stream captures", name);
    }
    if (const int code = load(*function)) return code;
    if (state().modules.find(call, function->module)->context != call.context)
        return call.breaks(INVALID_CONTEXT, "%s: of another context", name);
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535)
        return call.breaks(INVALID_VALUE, "%s: a grid of %u × %u × %u blocks", name, grid_x, grid_y, grid_z);
    if (block_x == 0 || block_x > 1024 || block_y != 1 || block_z != 1)
        return call.breaks(INVALID_VALUE, "%s: a block of %u × %u × %u threads", name, block_x, block_y, block_z);
    if (shared_bytes > unsigned(function->most_dynamic))
        return call.breaks(INVALID_VALUE, "%s: %u bytes of shared memory, where %d may be asked for", name, shared_bytes,
                           function->most_dynamic);
    if (extra != nullptr || parameters == nullptr || parameters[0] == nullptr)
        return call.breaks(INVALID_VALUE, "%s: no parameters", name);
    if (function->bytes > PARAMETER_BYTES)
        return call.breaks(INVALID_VALUE, "%s: %llu bytes of parameters", name, (unsigned long long)function->bytes);
    // The arguments are copied now.
    const std::vector<char> arguments((char*)parameters[0], (char*)parameters[0] + function->bytes);
    const Run run = {{grid_x, grid_y, grid_z}, block_x, shared_bytes, 0};
    const Work work = {function->name, [handle, run, arguments]() -> std::string {
                           const auto found = state().functions.all.find((uint64_t)handle);
                           if (found == state().functions.all.end()) return "its module was unloaded";
                           const char* const error = found->second->entry(&run, arguments.data());
                           return error == nullptr ? "" : error;
                       }};
    return double_enqueue("cuLaunchKernel", stream, &work);
}
