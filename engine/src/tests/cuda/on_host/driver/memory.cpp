// The fake driver: memory. Device memory is memory of this process, and only accessible while the device runs.
#include <sys/mman.h>
#include <unistd.h>

#include "state.hpp"

// Layouts of cuda.h.
struct Location {
    int type, id;
};
struct Properties {
    int type, handle_types;
    Location location;
    void* windows;
    unsigned char compression, remote;
    unsigned short usage;
    unsigned char reserved[4];
};
struct Access {
    Location location;
    int flags;
};
static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12, "as in cuda.h");

enum : int { PINNED = 1, ON_DEVICE = 1, READ_AND_WRITE = 3 };
// Flags of cuMemHostAlloc.
enum : unsigned { PORTABLE = 1, DEVICEMAP = 2 };

static constexpr uint64_t GRANULARITY = 2 << 20;
static constexpr uint64_t PAGE = 4096;
// This byte, repeated, is NaN in every float type.
static constexpr int POISON = 0xff;

struct Physical {
    int file;
    uint64_t bytes;
    bool is_released;
    int mappings;
    int device;
};

struct Mapping {
    uint64_t bytes;
    uint64_t physical;
    bool is_accessible;
};

struct Reservation {
    uint64_t bytes;
    std::map<uint64_t, Mapping> mappings;
};

static std::map<uint64_t, Reservation>& reservations() {
    static auto* const all = new std::map<uint64_t, Reservation>;
    return *all;
}

static std::map<uint64_t, Physical>& physicals() {
    static auto* const all = new std::map<uint64_t, Physical>;
    return *all;
}

struct OfHost {
    uint64_t bytes;
    bool is_mapped;
};

static std::map<uint64_t, OfHost>& of_host() {
    static auto* const all = new std::map<uint64_t, OfHost>;
    return *all;
}

static int open_windows = 0;

static void protect_all(int protection) {
    for (auto& [base, reservation] : reservations()) {
        for (auto& [address, mapping] : reservation.mappings) {
            if (mapping.is_accessible) mprotect((void*)address, mapping.bytes, protection);
        }
    }
}

Window::Window() {
    if (open_windows++ == 0) protect_all(PROT_READ | PROT_WRITE);
}

EXPORTED void double_window(int opens) {
    static std::vector<std::unique_ptr<Window>>* const open = new std::vector<std::unique_ptr<Window>>;
    if (opens) open->push_back(std::make_unique<Window>());
    else open->pop_back();
}

Window::~Window() {
    if (--open_windows == 0) protect_all(PROT_NONE);
}

static bool is_device(const Location& location) {
    return location.type == ON_DEVICE && location.id >= 0 && location.id < int(double_setting("DEVICES", 1));
}

static int judge(const Call& call, const Properties* properties, unsigned long long flags) {
    if (properties == nullptr) return call.breaks(INVALID_VALUE, "no properties");
    if (flags != 0) return call.breaks(INVALID_VALUE, "flags %llu", flags);
    if (properties->type != PINNED) return call.breaks(INVALID_VALUE, "an allocation of type %d", properties->type);
    if (properties->location.type != ON_DEVICE)
        return call.breaks(INVALID_VALUE, "a location of type %d", properties->location.type);
    if (!is_device(properties->location)) return call.breaks(INVALID_DEVICE, "device %d", properties->location.id);
    const Properties plain = {PINNED, 0, properties->location, nullptr, 0, 0, 0, {}};
    if (memcmp(properties, &plain, sizeof plain) != 0) return call.breaks(INVALID_VALUE, "properties that are not understood");
    return SUCCESS;
}

EXPORTED int cuMemGetAllocationGranularity(uint64_t* granularity, const Properties* properties, int option) {
    const Call call("cuMemGetAllocationGranularity", INITIALIZED);
    if (call.refused) return call.refused;
    if (granularity == nullptr || option < 0 || option > 1) return call.breaks(INVALID_VALUE, "option %d", option);
    if (const int code = judge(call, properties, 0)) return code;
    *granularity = GRANULARITY;
    return SUCCESS;
}

EXPORTED int cuMemCreate(uint64_t* handle, uint64_t bytes, const Properties* properties, unsigned long long flags) {
    const Call call("cuMemCreate", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    if (const int code = judge(call, properties, flags)) return code;
    if (handle == nullptr) return call.breaks(INVALID_VALUE, "nowhere to put the handle");
    if (bytes == 0 || bytes % GRANULARITY != 0)
        return call.breaks(INVALID_VALUE, "%llu bytes are no multiple of the granularity", (unsigned long long)bytes);
    if (!take(bytes)) return OUT_OF_MEMORY;
    const int file = memfd_create("double", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, off_t(bytes)) != 0) abort();
    void* const all = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (all == MAP_FAILED) abort();
    memset(all, POISON, bytes);
    munmap(all, bytes);
    *handle = state().next_handle += 16;
    physicals()[*handle] = {file, bytes, false, 0, properties->location.id};
    return SUCCESS;
}

static void free_if_unused(uint64_t handle) {
    const Physical& physical = physicals().at(handle);
    if (!physical.is_released || physical.mappings > 0) return;
    close(physical.file);
    give(physical.bytes);
    physicals().erase(handle);
}

EXPORTED int cuMemRelease(uint64_t handle) {
    const Call call("cuMemRelease", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    const auto found = physicals().find(handle);
    if (found == physicals().end() || found->second.is_released)
        return call.breaks(INVALID_VALUE, "%#llx is no memory (any more)", (unsigned long long)handle);
    found->second.is_released = true;
    free_if_unused(handle);
    return SUCCESS;
}

EXPORTED int cuMemAddressReserve(uint64_t* address, uint64_t bytes, uint64_t alignment, uint64_t hint, unsigned long long flags) {
    const Call call("cuMemAddressReserve", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    if (address == nullptr || flags != 0) return call.breaks(INVALID_VALUE, "flags %llu", flags);
    if (bytes == 0 || bytes % PAGE != 0 || hint % PAGE != 0)
        return call.breaks(INVALID_VALUE, "%llu bytes are no whole pages", (unsigned long long)bytes);
    if ((alignment & (alignment - 1)) != 0)
        return call.breaks(INVALID_VALUE, "alignment %llu is no power of two", (unsigned long long)alignment);
    const uint64_t aligned = alignment > GRANULARITY ? alignment : GRANULARITY;
    void* const all = mmap(nullptr, bytes + aligned, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return OUT_OF_MEMORY;
    const uint64_t base = ((uint64_t)all + aligned - 1) / aligned * aligned;
    if (base > (uint64_t)all) munmap(all, base - (uint64_t)all);
    munmap((void*)(base + bytes), (uint64_t)all + aligned - base);
    reservations()[base] = {bytes, {}};
    *address = base;
    return SUCCESS;
}

EXPORTED int cuMemAddressFree(uint64_t address, uint64_t bytes) {
    const Call call("cuMemAddressFree", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    const auto found = reservations().find(address);
    if (found == reservations().end() || found->second.bytes != bytes)
        return call.breaks(INVALID_VALUE, "%#llx of %llu bytes is no reservation", (unsigned long long)address,
                           (unsigned long long)bytes);
    if (!found->second.mappings.empty()) return call.breaks(INVALID_VALUE, "memory is still mapped there");
    munmap((void*)address, bytes);
    reservations().erase(found);
    return SUCCESS;
}

// Returns the reservation that contains a range, or null if there is none.
static Reservation* reservation_of(uint64_t address, uint64_t bytes) {
    auto found = reservations().upper_bound(address);
    if (found == reservations().begin()) return nullptr;
    --found;
    return address + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

EXPORTED int cuMemMap(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t handle, unsigned long long flags) {
    const Call call("cuMemMap", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    if (flags != 0 || offset != 0)
        return call.breaks(INVALID_VALUE, "flags %llu, offset %llu: both must be 0", flags, (unsigned long long)offset);
    if (bytes == 0 || (address | bytes) % GRANULARITY != 0)
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: not of the granularity", (unsigned long long)address,
                           (unsigned long long)bytes);
    const auto found = physicals().find(handle);
    if (found == physicals().end() || found->second.is_released)
        return call.breaks(INVALID_VALUE, "%#llx is no memory (any more)", (unsigned long long)handle);
    if (bytes > found->second.bytes)
        return call.breaks(INVALID_VALUE, "%llu bytes of a memory of %llu", (unsigned long long)bytes,
                           (unsigned long long)found->second.bytes);
    Reservation* const reservation = reservation_of(address, bytes);
    if (reservation == nullptr) return call.breaks(INVALID_VALUE, "%#llx is not reserved", (unsigned long long)address);
    for (const auto& [other, mapping] : reservation->mappings) {
        if (other < address + bytes && address < other + mapping.bytes)
            return call.breaks(INVALID_VALUE, "%#llx is mapped", (unsigned long long)other);
    }
    if (mmap((void*)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0) == MAP_FAILED) abort();
    reservation->mappings[address] = {bytes, handle, false};
    ++found->second.mappings;
    return SUCCESS;
}

// True if a range consists of whole mappings: one, or several adjacent ones.
static bool is_whole(const Reservation& reservation, uint64_t address, uint64_t bytes) {
    uint64_t at = address;
    while (at < address + bytes && reservation.mappings.count(at) == 1) at += reservation.mappings.at(at).bytes;
    return bytes != 0 && at == address + bytes;
}

EXPORTED int cuMemUnmap(uint64_t address, uint64_t bytes) {
    const Call call("cuMemUnmap", INITIALIZED | SAFE | WAITS);
    if (call.refused) return call.refused;
    Reservation* const reservation = reservation_of(address, bytes);
    if (reservation == nullptr) return call.breaks(INVALID_VALUE, "%#llx is not reserved", (unsigned long long)address);
    if (!is_whole(*reservation, address, bytes))
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: no whole mappings", (unsigned long long)address,
                           (unsigned long long)bytes);
    for (uint64_t at = address; at < address + bytes;) {
        const Mapping mapping = reservation->mappings.at(at);
        if (mmap((void*)at, mapping.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
            abort();
        reservation->mappings.erase(at);
        --physicals().at(mapping.physical).mappings;
        free_if_unused(mapping.physical);
        at += mapping.bytes;
    }
    return SUCCESS;
}

EXPORTED int cuMemSetAccess(uint64_t address, uint64_t bytes, const Access* access, uint64_t count) {
    const Call call("cuMemSetAccess", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    if (access == nullptr || count != 1) return call.breaks(INVALID_VALUE, "%llu descriptions", (unsigned long long)count);
    if (!is_device(access->location)) return call.breaks(INVALID_DEVICE, "no such location");
    if (access->flags != READ_AND_WRITE) return call.breaks(INVALID_VALUE, "access %d", access->flags);
    Reservation* const reservation = reservation_of(address, bytes);
    if (reservation == nullptr) return call.breaks(INVALID_VALUE, "%#llx is not reserved", (unsigned long long)address);
    if (!is_whole(*reservation, address, bytes))
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: not all mapped, or parts of mappings", (unsigned long long)address,
                           (unsigned long long)bytes);
    for (uint64_t at = address; at < address + bytes; at += reservation->mappings.at(at).bytes)
        reservation->mappings.at(at).is_accessible = true;
    if (open_windows > 0) protect_all(PROT_READ | PROT_WRITE);
    return SUCCESS;
}

// Allocates memory at an address that the driver chooses.
EXPORTED int cuMemAlloc_v2(uint64_t* address, uint64_t bytes) {
    const Call call("cuMemAlloc", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    if (address == nullptr || bytes == 0) return call.breaks(INVALID_VALUE, "0 bytes");
    const Properties properties = {PINNED, 0, {ON_DEVICE, call.context->device}, nullptr, 0, 0, 0, {}};
    const Access access = {properties.location, READ_AND_WRITE};
    const uint64_t whole = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    uint64_t handle;
    if (const int code = cuMemCreate(&handle, whole, &properties, 0)) return code;
    cuMemAddressReserve(address, whole, 0, 0, 0);
    cuMemMap(*address, whole, 0, handle, 0);
    cuMemSetAccess(*address, whole, &access, 1);
    return cuMemRelease(handle);
}

EXPORTED int cuMemFree_v2(uint64_t address) {
    const Call call("cuMemFree", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    const auto found = reservations().find(address);
    if (found == reservations().end()) return call.breaks(INVALID_VALUE, "%#llx was not allocated", (unsigned long long)address);
    const uint64_t bytes = found->second.bytes;
    if (const int code = cuMemUnmap(address, bytes)) return code;
    return cuMemAddressFree(address, bytes);
}

EXPORTED int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    enum : int { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, OF_DEVICE = 2 };
    const Call call("cuPointerGetAttribute", INITIALIZED);
    if (call.refused) return call.refused;
    // This is not a broken rule, because callers may ask about unknown addresses.
    Reservation* const reservation = reservation_of(address, 1);
    if (reservation == nullptr) return INVALID_VALUE;
    auto found = reservation->mappings.upper_bound(address);
    if (found == reservation->mappings.begin()) return INVALID_VALUE;
    --found;
    if (attribute == MEMORY_TYPE) {
        *(unsigned*)value = OF_DEVICE;
    } else if (attribute == DEVICE_ORDINAL) {
        *(int*)value = physicals().at(found->second.physical).device;
    } else {
        return call.breaks(INVALID_VALUE, "attribute %d", attribute);
    }
    return SUCCESS;
}

// Allocates pinned host memory. Host and device share one address space, so a device uses the same address for it.
EXPORTED int cuMemHostAlloc(void** memory, uint64_t bytes, unsigned flags) {
    const Call call("cuMemHostAlloc", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    if (memory == nullptr || bytes == 0) return call.breaks(INVALID_VALUE, "0 bytes");
    if ((flags & ~(PORTABLE | DEVICEMAP)) != 0) return call.breaks(INVALID_VALUE, "flags %u", flags);
    void* const all = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return OUT_OF_MEMORY;
    memset(all, POISON, bytes);
    *memory = all;
    of_host()[(uint64_t)all] = {bytes, (flags & DEVICEMAP) != 0};
    return SUCCESS;
}

EXPORTED int cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned flags) {
    const Call call("cuMemHostGetDevicePointer", CONTEXT);
    if (call.refused) return call.refused;
    const auto found = of_host().find((uint64_t)memory);
    if (address == nullptr || flags != 0 || found == of_host().end() || !found->second.is_mapped)
        return call.breaks(INVALID_VALUE, "%p is not mapped to the device", memory);
    *address = (uint64_t)memory;
    return SUCCESS;
}

EXPORTED int cuMemFreeHost(void* memory) {
    const Call call("cuMemFreeHost", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    const auto found = of_host().find((uint64_t)memory);
    if (found == of_host().end()) return call.breaks(INVALID_VALUE, "%p was not allocated, or is free", memory);
    munmap(memory, found->second.bytes);
    of_host().erase(found);
    return SUCCESS;
}

EXPORTED int double_is_accessible(uint64_t address, uint64_t bytes) {
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    auto found = of_host().upper_bound(address);
    if (found != of_host().begin()) {
        --found;
        if (address + bytes <= found->first + found->second.bytes) return found->second.is_mapped;
    }
    Reservation* const reservation = reservation_of(address, bytes);
    if (reservation == nullptr) return 0;
    for (uint64_t at = address; at < address + bytes;) {
        auto found = reservation->mappings.upper_bound(at);
        if (found == reservation->mappings.begin()) return 0;
        --found;
        if (at >= found->first + found->second.bytes || !found->second.is_accessible) return 0;
        at = found->first + found->second.bytes;
    }
    return 1;
}

EXPORTED int cuMemGetInfo_v2(uint64_t* free, uint64_t* total) {
    const Call call("cuMemGetInfo", CONTEXT);
    if (call.refused) return call.refused;
    if (free == nullptr || total == nullptr) return call.breaks(INVALID_VALUE, "nowhere to put it");
    *free = total_bytes() - state().used;
    *total = total_bytes();
    return SUCCESS;
}

// Copies from pageable memory are staged. They arrive when the legacy default stream reaches them. A stream that does
// not synchronize with the legacy default stream must be synchronized in another way ("API synchronization behavior"
// in the driver's documentation).
EXPORTED int cuMemcpyHtoD_v2(uint64_t to, const void* from, uint64_t bytes) {
    const Call call("cuMemcpyHtoD", CONTEXT | SAFE | LEGACY);
    if (call.refused) return call.refused;
    if (bytes == 0) return SUCCESS;
    if (from == nullptr || !double_is_accessible(to, bytes))
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: not all mapped and accessible", (unsigned long long)to,
                           (unsigned long long)bytes);
    if (const int code = run_blocking(*call.context)) return code;
    std::vector<char> staged((const char*)from, (const char*)from + bytes);
    call.context->landing.push_back({"a copy to the device", [to, staged = std::move(staged)]() -> std::string {
                                         memcpy((void*)to, staged.data(), staged.size());
                                         return "";
                                     }});
    return SUCCESS;
}

// Copies in stream order. The host's bytes are only read when the stream reaches the copy, which is the latest time
// that the documentation allows ("might be synchronous").
EXPORTED int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, uint64_t bytes, void* stream) {
    const Call call("cuMemcpyHtoDAsync", CONTEXT);
    if (call.refused) return call.refused;
    if (bytes == 0) return SUCCESS;
    if (from == nullptr || !double_is_accessible(to, bytes))
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: not all mapped and accessible", (unsigned long long)to,
                           (unsigned long long)bytes);
    const Work work = {call.name, [to, from, bytes]() -> std::string {
                           memcpy((void*)to, from, bytes);
                           return "";
                       }};
    return double_enqueue(call.name, stream, &work);
}

// Copies in stream order. Only a copy to pinned memory returns before the stream reaches it.
EXPORTED int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, uint64_t bytes, void* stream) {
    const Call call("cuMemcpyDtoHAsync", CONTEXT);
    if (call.refused) return call.refused;
    if (bytes == 0) return SUCCESS;
    auto found = of_host().upper_bound((uint64_t)to);
    const bool is_pinned = found != of_host().begin() && (--found, (uint64_t)to + bytes <= found->first + found->second.bytes);
    if (!is_pinned) return call.breaks(INVALID_VALUE, "%p, %llu bytes: not in pinned memory", to, (unsigned long long)bytes);
    if (!double_is_accessible(from, bytes))
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: not all mapped and accessible", (unsigned long long)from,
                           (unsigned long long)bytes);
    const Work work = {call.name, [to, from, bytes]() -> std::string {
                           memcpy(to, (const void*)from, bytes);
                           return "";
                       }};
    return double_enqueue(call.name, stream, &work);
}

EXPORTED int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, uint64_t bytes, void* stream) {
    const Call call("cuMemcpyDtoDAsync", CONTEXT);
    if (call.refused) return call.refused;
    if (bytes == 0) return SUCCESS;
    if (!double_is_accessible(from, bytes) || !double_is_accessible(to, bytes))
        return call.breaks(INVALID_VALUE, "%llu bytes: not all mapped and accessible", (unsigned long long)bytes);
    const Work work = {call.name, [to, from, bytes]() -> std::string {
                           memmove((void*)to, (const void*)from, bytes);
                           return "";
                       }};
    return double_enqueue(call.name, stream, &work);
}

EXPORTED int cuMemsetD8Async(uint64_t to, unsigned char byte, uint64_t bytes, void* stream) {
    const Call call("cuMemsetD8Async", CONTEXT);
    if (call.refused) return call.refused;
    if (bytes == 0) return SUCCESS;
    if (!double_is_accessible(to, bytes))
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: not all mapped and accessible", (unsigned long long)to,
                           (unsigned long long)bytes);
    const Work work = {call.name, [to, byte, bytes]() -> std::string {
                           memset((void*)to, byte, bytes);
                           return "";
                       }};
    return double_enqueue(call.name, stream, &work);
}

EXPORTED int cuMemcpyDtoH_v2(void* to, uint64_t from, uint64_t bytes) {
    const Call call("cuMemcpyDtoH", CONTEXT | SAFE | LEGACY);
    if (call.refused) return call.refused;
    if (bytes == 0) return SUCCESS;
    if (to == nullptr || !double_is_accessible(from, bytes))
        return call.breaks(INVALID_VALUE, "%#llx, %llu bytes: not all mapped and accessible", (unsigned long long)from,
                           (unsigned long long)bytes);
    if (const int code = run_legacy(*call.context)) return code;
    const Window window;
    memcpy(to, (const void*)from, bytes);
    return SUCCESS;
}

void tell_of_memory(const std::function<void(uint64_t, const std::string&)>& tell) {
    tell(physicals().size(), "memory");
    tell(reservations().size(), "range of addresses");
    tell(of_host().size(), "memory of the host");
}
