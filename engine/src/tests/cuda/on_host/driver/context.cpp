// The fake driver: initialization, devices, contexts, and the report at the end of the process.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include "state.hpp"

thread_local void* current = nullptr;

static void tell_at_the_end();

// The state is never destroyed, because it is used until the process ends.
State& state() {
    static State* const all = new State;
    return *all;
}

EXPORTED uint64_t double_setting(const char* name, uint64_t otherwise) {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    const auto found = state().settings.find(name);
    if (found != state().settings.end()) return found->second;
    const char* const of_process = getenv((std::string("GAPLESS_DOUBLE_") + name).c_str());
    return of_process == nullptr ? otherwise : strtoull(of_process, nullptr, 10);
}

EXPORTED void double_set(const char* name, uint64_t value) {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    state().settings[name] = value;
}

EXPORTED void double_fail(const char* call, uint64_t number, int code) {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    state().failing = call;
    state().before_failing = number - 1;
    state().failure = code;
}

EXPORTED const char* double_calls() {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    static std::string text;
    text.clear();
    for (const auto& [name, count] : state().calls) text += name + " " + std::to_string(count) + "\n";
    state().calls.clear();
    return text.c_str();
}

EXPORTED void double_broken(const char* call, const char* what) {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    ++state().broken;
    fprintf(stderr, DOUBLE "%s: %s\n", call, what);
}

EXPORTED int double_called(const char* call) {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    ++state().calls[call];
    if (state().failing != call || state().before_failing-- > 0) return 0;
    state().failing.clear();
    return state().failure;
}

Call::Call(const char* name, unsigned needs)
    : Judged{name}, lock(state().lock), refused(needs & COUNTED ? 0 : double_called(name)) {
    if (refused == 0) refused = judge(needs);
}

int Call::judge(unsigned needs) {
    if ((needs & INITIALIZED) != 0 && !state().is_initialized) return breaks(NOT_INITIALIZED, "before cuInit");
    if ((needs & CONTEXT) == CONTEXT) {
        if (current == nullptr) return breaks(INVALID_CONTEXT, "no context is current to the thread");
        const auto found = state().contexts.all.find((uint64_t)current);
        if (found == state().contexts.all.end()) return breaks(CONTEXT_IS_DESTROYED, "the thread's context was released");
        context = found->second.get();
        if (context->error != 0) return context->error;
    }
    for (auto& [handle, stream] : state().streams.all) {
        if (!stream->is_capturing) continue;
        const bool is_own = stream->thread == std::this_thread::get_id();
        const bool is_in_the_way = is_own ? stream->mode != Mode::RELAXED : stream->mode == Mode::GLOBAL;
        if ((needs & SAFE) != 0 && is_in_the_way) {
            stream->is_invalidated = true;
            return breaks(CAPTURE_UNSUPPORTED, "while a stream captures");
        }
        if ((needs & WAITS) != 0 && (context == nullptr || stream->context == context)) {
            stream->is_invalidated = true;
            return breaks(CAPTURE_UNSUPPORTED, "may wait for a context in which a stream captures");
        }
        if ((needs & LEGACY) != 0 && stream->is_blocking && stream->context == context) {
            stream->is_invalidated = true;
            return breaks(CAPTURE_IMPLICIT, "goes over the legacy default stream while a blocking stream captures");
        }
    }
    return SUCCESS;
}

EXPORTED int double_enter(const char* name, int is_unsafe_in_capture) {
    return Call(name, COUNTED | CONTEXT | (is_unsafe_in_capture ? SAFE | WAITS : NOTHING)).refused;
}

uint64_t total_bytes() { return double_setting("MEMORY", 64ull << 30); }

int architecture() { return int(double_setting("ARCHITECTURE", 90)); }

// Returns the maximum shared memory of a block, from the programming guide's table of compute capabilities.
int most_shared_bytes() {
    switch (architecture()) {
        case 80:
        case 87: return 163 << 10;
        case 86:
        case 89:
        case 120: return 99 << 10;
        default: return 227 << 10;
    }
}

// Reports an invalid memory access by a kernel, or by the host outside of a Window.
static void tell_of_address(int, siginfo_t* info, void*) {
    const std::string& running = state().running;
    char line[512];
    const char* const who = running.empty() ? "the host" : running.c_str();
    const int length = snprintf(line, sizeof line, DOUBLE "%s touches %p, which it may not\n", who, info->si_addr);
    if (write(2, line, size_t(length)) != length) _exit(71);
    _exit(70);
}

EXPORTED int cuDriverGetVersion(int* version) {
    const Call call("cuDriverGetVersion", NOTHING);
    if (call.refused) return call.refused;
    if (version == nullptr) return call.breaks(INVALID_VALUE, "no room for the version");
    *version = int(double_setting("VERSION", 13000));
    return SUCCESS;
}

EXPORTED int cuInit(unsigned flags) {
    const Call call("cuInit", NOTHING);
    if (call.refused) return call.refused;
    if (flags != 0) return call.breaks(INVALID_VALUE, "flags %u", flags);
    if (state().is_initialized) return SUCCESS;
    if (double_setting("DEVICES", 1) == 0) return NO_DEVICE;
    state().is_initialized = true;
    struct sigaction action = {};
    action.sa_sigaction = tell_of_address;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    atexit(tell_at_the_end);
    return SUCCESS;
}

static const std::map<int, std::pair<const char*, const char*>>& texts() {
    static const std::map<int, std::pair<const char*, const char*>> all = {
        {SUCCESS, {"CUDA_SUCCESS", "no error"}},
        {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
        {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
        {NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
        {NO_DEVICE, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
        {INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
        {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
        {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
        {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
        {CONTEXT_IS_DESTROYED, {"CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"}},
        {CAPTURE_UNSUPPORTED, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted when stream is capturing"}},
        {CAPTURE_INVALIDATED, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "failed due to a previous error during capture"}},
        {CAPTURE_IMPLICIT, {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "would make the legacy stream depend on a capturing one"}},
        {CAPTURE_WRONG_THREAD, {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "capture was begun by another thread"}},
        {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
        {NO_BINARY_FOR_GPU, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available"}},
        {UNKNOWN, {"CUDA_ERROR_UNKNOWN", "unknown error"}},
        {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    };
    return all;
}

static int text_of(int code, const char** to, bool is_name) {
    const auto found = texts().find(code);
    if (found == texts().end()) return INVALID_VALUE;
    *to = is_name ? found->second.first : found->second.second;
    return SUCCESS;
}

EXPORTED int cuGetErrorName(int code, const char** to) { return text_of(code, to, true); }

EXPORTED int cuGetErrorString(int code, const char** to) { return text_of(code, to, false); }

EXPORTED int cuDeviceGetCount(int* count) {
    const Call call("cuDeviceGetCount", INITIALIZED);
    if (call.refused) return call.refused;
    *count = int(double_setting("DEVICES", 1));
    return SUCCESS;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
    const Call call("cuDeviceGet", INITIALIZED);
    if (call.refused) return call.refused;
    // This is not a broken rule, because callers may try ordinals to find out which devices exist.
    if (ordinal < 0 || ordinal >= int(double_setting("DEVICES", 1))) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

static bool is_device(const Judged& call, int device) {
    if (device >= 0 && device < int(double_setting("DEVICES", 1))) return true;
    call.breaks(0, "%d is no device", device);
    return false;
}

EXPORTED int cuDeviceGetName(char* name, int length, int device) {
    const Call call("cuDeviceGetName", INITIALIZED);
    if (call.refused) return call.refused;
    if (!is_device(call, device)) return INVALID_DEVICE;
    if (name == nullptr || length <= 0) return call.breaks(INVALID_VALUE, "no room for a name");
    snprintf(name, size_t(length), "Double of sm_%d", architecture());
    return SUCCESS;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int device) {
    const Call call("cuDeviceGetAttribute", INITIALIZED);
    if (call.refused) return call.refused;
    if (!is_device(call, device)) return INVALID_DEVICE;
    const std::map<int, int> all = {
        {1, 1024},      // MAX_THREADS_PER_BLOCK
        {8, 48 << 10},  // MAX_SHARED_MEMORY_PER_BLOCK
        {33, 0x1b + device},  // PCI_BUS_ID
        {34, 0},        // PCI_DEVICE_ID
        {50, 0},        // PCI_DOMAIN_ID
        {75, architecture() / 10},
        {76, architecture() % 10},  // COMPUTE_CAPABILITY_MAJOR, _MINOR
        {97, most_shared_bytes()},  // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        {102, 1},                   // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        {115, 0},                   // MEMORY_POOLS_SUPPORTED
    };
    if (value == nullptr || all.count(attribute) == 0) return call.breaks(INVALID_VALUE, "attribute %d", attribute);
    *value = all.at(attribute);
    return SUCCESS;
}

// Bytes of device memory that a context takes.
static constexpr uint64_t CONTEXT_BYTES = 420 << 20;

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
    const Call call("cuDevicePrimaryCtxRetain", INITIALIZED);
    if (call.refused) return call.refused;
    if (!is_device(call, device)) return INVALID_DEVICE;
    if (context == nullptr) return call.breaks(INVALID_VALUE, "nowhere to put it");
    void*& primary = state().primaries[device];
    if (primary == nullptr) {
        if (!take(CONTEXT_BYTES)) return OUT_OF_MEMORY;
        Context made;
        made.device = device;
        primary = state().contexts.add(std::move(made));
    }
    ++state().contexts.find(call, primary)->retained;
    *context = primary;
    return SUCCESS;
}

// Destroys the objects of a context. After that, their handles are invalid.
template <typename T, typename Is>
static void end(const Call& call, Table<T>& table, Is is_of) {
    for (auto at = table.all.begin(); at != table.all.end();) {
        if (!is_of(*at->second)) {
            ++at;
            continue;
        }
        call.breaks(0, "the context is over, and a %s was not destroyed", table.what);
        at = table.all.erase(at);
    }
}

EXPORTED int cuDevicePrimaryCtxRelease_v2(int device) {
    const Call call("cuDevicePrimaryCtxRelease", INITIALIZED);
    if (call.refused) return call.refused;
    if (!is_device(call, device)) return INVALID_DEVICE;
    void*& primary = state().primaries[device];
    if (primary == nullptr) return call.breaks(INVALID_CONTEXT, "it is not retained");
    Context* const context = state().contexts.find(call, primary);
    if (--context->retained > 0) return SUCCESS;
    end(call, state().streams, [&](const Stream& stream) { return stream.context == context; });
    end(call, state().modules, [&](const Module& module) { return module.context == context; });
    for (const auto& [what, count] : context->others) {
        if (count != 0) call.breaks(0, "the context is over, and %d × %s was not destroyed", count, what.c_str());
    }
    state().is_library_lost |= !context->others.empty();
    give(CONTEXT_BYTES + context->local_bytes);
    state().contexts.remove(call, primary);
    primary = nullptr;
    return SUCCESS;
}

EXPORTED void double_exists(const char* what, int difference, int is_in_context) {
    const Judged call{what};
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    if (!is_in_context) {
        state().others[what] += difference;
    } else if (Context* const context = state().contexts.find(call, current)) {
        if (difference > 0 && state().is_library_lost)
            call.breaks(0, "what it keeps for the process was in a context that is over");
        context->others[what] += difference;
    }
}

EXPORTED void double_lock(int takes) {
    if (takes) state().lock.lock();
    else state().lock.unlock();
}

EXPORTED int double_device() {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    const auto found = state().contexts.all.find((uint64_t)current);
    return found == state().contexts.all.end() ? -1 : found->second->device;
}

EXPORTED int cuDeviceCanAccessPeer(int* can, int device, int peer) {
    const Call call("cuDeviceCanAccessPeer", INITIALIZED);
    if (call.refused) return call.refused;
    if (!is_device(call, device) || !is_device(call, peer)) return INVALID_DEVICE;
    *can = device != peer;
    return SUCCESS;
}

EXPORTED int cuCtxGetCurrent(void** context) {
    const Call call("cuCtxGetCurrent", INITIALIZED);
    if (call.refused) return call.refused;
    *context = current;
    return SUCCESS;
}

EXPORTED int cuCtxSetCurrent(void* context) {
    const Call call("cuCtxSetCurrent", INITIALIZED);
    if (call.refused) return call.refused;
    if (context != nullptr && state().contexts.find(call, context) == nullptr) return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}

bool take(uint64_t bytes) {
    if (bytes > total_bytes() - state().used) return false;
    state().used += bytes;
    return true;
}

void give(uint64_t bytes) { state().used -= bytes; }

EXPORTED int double_take(int64_t bytes) {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    if (bytes < 0) give(uint64_t(-bytes));
    return bytes < 0 || take(uint64_t(bytes)) ? SUCCESS : OUT_OF_MEMORY;
}

EXPORTED const char* double_left() {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    static std::string text;
    text.clear();
    const auto tell = [](uint64_t count, const std::string& what) {
        if (count != 0) text += std::to_string(count) + " × " + what + "\n";
    };
    const auto tell_of = [&](const auto& table) { tell(table.all.size(), table.what); };
    // A primary context that was retained once stays until the process ends.
    uint64_t kept = 0;
    for (const auto& [handle, context] : state().contexts.all) {
        kept += CONTEXT_BYTES + context->local_bytes;
        if (context->retained > 1) tell(uint64_t(context->retained), "time that the primary context was retained");
    }
    tell_of(state().streams), tell_of(state().modules), tell_of(state().graphs),
        tell_of(state().executables);
        tell_of(state().events);
    for (const auto& [handle, context] : state().contexts.all) {
        for (const auto& [what, count] : context->others) tell(uint64_t(count), what);
    }
    for (const auto& [what, count] : state().others) tell(uint64_t(count), what);
    tell_of_memory(tell);
    tell(state().used - kept, "byte of the device's memory");
    return text.c_str();
}

static void tell_at_the_end() {
    const std::string left = double_left();
    if (!left.empty()) fprintf(stderr, "left at the end:\n%s", left.c_str());
    fprintf(stderr, "the double of the driver was asked, and %llu rules were broken\n", (unsigned long long)state().broken);
}
