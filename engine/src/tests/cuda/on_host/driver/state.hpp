// The state of the fake driver.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "double.hpp"

// The conditions that must hold for a call.
enum Needs : unsigned {
    NOTHING = 0,
    INITIALIZED = 1,
    // A context must be current in the thread.
    CONTEXT = 2 | INITIALIZED,
    // The call is forbidden while the thread is capturing. The documentation calls such calls "potentially unsafe".
    SAFE = 4,
    // The call uses the legacy default stream.
    LEGACY = 8,
    // Another library has already counted the call.
    COUNTED = 16,
    // The call may wait for the whole context, as when it loads code or releases memory. It is forbidden to all threads
    // while a stream of the context captures.
    WAITS = 32,
};

struct Context {
    int device = 0;
    int retained = 0;
    // The error that all calls return after a kernel has failed; 0 if none has failed.
    int error = 0;
    // Staged copies to the device that have not arrived yet.
    std::deque<Work> landing;
    // Objects of other libraries, by kind.
    std::map<std::string, int> others;
    // Device memory for the local memory of kernels, allocated at the first launch of a graph.
    uint64_t local_bytes = 0;
};

enum class Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

struct Stream {
    Context* context;
    bool is_blocking;
    std::deque<Work> queue;
    bool is_capturing = false, is_invalidated = false;
    Mode mode = Mode::GLOBAL;
    std::thread::id thread;
    std::vector<Work> captured;
    // The stream whose capture this one has joined by waiting for an event; 0 if it captures for itself.
    uint64_t origin = 0;
    // Number of captured items that the origin has waited for. They have moved to the origin.
    uint64_t joined = 0;
};

struct Event {
    Context* context;
    bool is_timed;
    // The stream on which the event was last recorded.
    void* stream = nullptr;
    // The number of times the event was recorded, and the last of these recordings that the event's stream has
    // reached.
    uint64_t recorded = 0;
    std::shared_ptr<uint64_t> reached = std::make_shared<uint64_t>(0);
    std::chrono::steady_clock::time_point at;
    // The capturing stream on which the event was last recorded, or 0, and the number of items captured there before.
    uint64_t captured_on = 0, captured_after = 0;

    bool is_reached() const { return *reached == recorded; }
};

struct Module {
    Context* context;
    void* library;
};

struct Function {
    void* module;
    std::string name;
    const char* (*entry)(const void* run, const void* arguments);
    uint64_t bytes;
    int most_dynamic;
    bool is_loaded = false;
};

struct Graph {
    std::vector<Work> nodes;
    // Bytes of device memory that the graph takes once it is uploaded.
    uint64_t bytes = 0;
    bool is_there = false;
};

// Objects by handle. No handle is used twice, so that the use of a destroyed object is detected.
template <typename T>
struct Table {
    const char* what;
    std::map<uint64_t, std::unique_ptr<T>> all;

    void* add(T object);
    // Returns the object. If the handle is invalid, reports a broken rule and returns null.
    T* find(const Judged& call, const void* handle);
    // True if it existed.
    bool remove(const Judged& call, const void* handle);
};

struct State {
    // Serializes the calls of all threads, and the work that they start.
    std::recursive_mutex lock;
    bool is_initialized = false;
    uint64_t next_handle = 0xd0b1'0000'0000;
    uint64_t broken = 0;
    std::map<std::string, uint64_t> calls, settings;
    // The call that must fail, and the number of calls of the same name before it.
    std::string failing;
    uint64_t before_failing = 0;
    int failure = 0;
    // Objects of other libraries that belong to no context, by kind.
    std::map<std::string, int> others;
    // Bytes of device memory in use.
    uint64_t used = 0;

    Table<Context> contexts{"context", {}};
    Table<Stream> streams{"stream", {}};
    Table<Event> events{"event", {}};
    Table<Module> modules{"module", {}};
    Table<Function> functions{"function", {}};
    Table<Graph> graphs{"graph", {}};
    Table<Graph> executables{"executable graph", {}};
    // Handles of the retained primary contexts, by device.
    std::map<int, void*> primaries;
    // True if a primary context has been destroyed after a library used it. The library's per-process state is then
    // lost.
    bool is_library_lost = false;
    // The name of the work that is running.
    std::string running;
};

State& state();

// The current context of this thread.
extern thread_local void* current;

// A call of the driver. Its constructor takes the lock and checks the conditions in `needs`.
struct Call : Judged {
    std::unique_lock<std::recursive_mutex> lock;
    Context* context = nullptr;
    // The code that the call must return; 0 if the call may proceed.
    int refused;

    Call(const char* name, unsigned needs);

 private:
    int judge(unsigned needs);
};

// Returns the bytes of the device's memory.
uint64_t total_bytes();
// 90 for sm_90.
int architecture();
int most_shared_bytes();

// Allocates device memory. Returns false if there is too little.
bool take(uint64_t bytes);
void give(uint64_t bytes);

// True if a stream captures.
bool is_capturing(const void* stream);
// Makes a capture fail.
void invalidate(void* stream);
// Records an event on a capturing stream.
void capture(Event& event, uint64_t stream);
// Lets a stream wait for an event of a capture. Returns a Result.
int capture_wait(const Judged& call, Stream& stream, const Event& event);

// The result of running a stream that waits for another stream.
static constexpr int WAITING = -1;

// Runs the work of a stream, until the stream waits for another one. Then lets pending copies to the device arrive;
// if the stream is blocking, they arrive before the work runs.
int run(Stream& stream);
// Runs all streams as far as possible.
void run_others();
// Runs all work of a stream. While the stream waits, the lock is released, so that other threads can make calls.
int finish(Call& call, Stream& stream);
// Lets pending copies arrive, and runs the streams that synchronize with the legacy default stream.
int run_legacy(Context& context);
// Runs everything that the legacy default stream waits for, without letting pending copies arrive.
int run_blocking(Context& context);

// An object that allows the host to access the device's memory as long as the object lives.
struct Window {
    Window();
    ~Window();
};

// Reports the number of allocations of each kind.
void tell_of_memory(const std::function<void(uint64_t, const std::string&)>& tell);

template <typename T>
void* Table<T>::add(T object) {
    const uint64_t handle = state().next_handle += 16;
    all[handle] = std::make_unique<T>(std::move(object));
    return (void*)handle;
}

template <typename T>
T* Table<T>::find(const Judged& call, const void* handle) {
    const auto found = all.find((uint64_t)handle);
    if (found != all.end()) return found->second.get();
    const bool was = (uint64_t)handle > 0xd0b1'0000'0000 && (uint64_t)handle <= state().next_handle;
    call.breaks(0, "%p is no %s%s", handle, what, was ? " (any more)" : "");
    return nullptr;
}

template <typename T>
bool Table<T>::remove(const Judged& call, const void* handle) {
    return find(call, handle) != nullptr && all.erase((uint64_t)handle) == 1;
}
