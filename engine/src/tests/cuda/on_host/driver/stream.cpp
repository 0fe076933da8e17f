// The fake driver: streams, capturing, and graphs. Work on a stream only runs when something waits for the stream.
#include "state.hpp"

enum : unsigned { NON_BLOCKING = 1 };

// Bytes of device memory that an executable graph takes per node, and the unit to which the graph's total is rounded
// up.
static constexpr uint64_t NODE_BYTES = 4096, GRAPH_PAGE = 64 << 10;

static int run_all(Context& context, std::deque<Work>& queue) {
    while (!queue.empty() && context.error == 0) {
        Work work = std::move(queue.front());
        queue.pop_front();
        const std::unique_ptr<Window> window = work.touches ? std::make_unique<Window>() : nullptr;
        state().running = work.name;
        const std::string what = work.run();
        state().running.clear();
        if (what.empty()) continue;
        if (what == Work::WAITS) {
            queue.push_front(std::move(work));
            return WAITING;
        }
        double_broken(work.name.c_str(), what.c_str());
        context.error = LAUNCH_FAILED;
    }
    return context.error;
}

int run_blocking(Context& context) {
    for (auto& [handle, stream] : state().streams.all) {
        if (stream->context != &context || !stream->is_blocking) continue;
        if (const int code = run_all(context, stream->queue)) return code;
    }
    return SUCCESS;
}

int run_legacy(Context& context) {
    if (const int code = run_blocking(context)) return code;
    return run_all(context, context.landing);
}

int run(Stream& stream) {
    // A blocking stream first waits for the copies of the legacy default stream. Other streams do not wait, so that
    // missing synchronization has an effect.
    if (stream.is_blocking) {
        if (const int code = run_all(*stream.context, stream.context->landing)) return code;
    }
    if (const int code = run_all(*stream.context, stream.queue)) return code;
    return run_all(*stream.context, stream.context->landing);
}

void run_others() {
    for (auto& [handle, stream] : state().streams.all) {
        if (!stream->is_capturing) run(*stream);
    }
}

// Time after which a wait that cannot end is reported.
static constexpr std::chrono::seconds PATIENCE(60);

int finish(Call& call, Stream& stream) {
    const auto begun = std::chrono::steady_clock::now();
    while (true) {
        if (const int code = run(stream); code != WAITING) return code;
        run_others();
        if (std::chrono::steady_clock::now() - begun > PATIENCE) {
            const std::string name = stream.queue.front().name;
            return call.breaks(LAUNCH_FAILED, "%s waits for what does not come", name.c_str());
        }
        call.lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        call.lock.lock();
    }
}

EXPORTED int cuCtxSynchronize() {
    Call call("cuCtxSynchronize", CONTEXT | SAFE | WAITS);
    if (call.refused) return call.refused;
    std::vector<Stream*> streams;
    for (auto& [handle, stream] : state().streams.all) {
        if (stream->context == call.context) streams.push_back(stream.get());
    }
    for (Stream* const stream : streams) {
        if (const int code = finish(call, *stream)) return code;
    }
    return SUCCESS;
}

EXPORTED int cuStreamCreate(void** stream, unsigned flags) {
    const Call call("cuStreamCreate", CONTEXT);
    if (call.refused) return call.refused;
    if (stream == nullptr || flags > NON_BLOCKING) return call.breaks(INVALID_VALUE, "flags %u", flags);
    Stream made;
    made.context = call.context;
    made.is_blocking = flags != NON_BLOCKING;
    *stream = state().streams.add(std::move(made));
    return SUCCESS;
}

EXPORTED int cuStreamDestroy_v2(void* handle) {
    const Call call("cuStreamDestroy", CONTEXT);
    if (call.refused) return call.refused;
    Stream* const stream = state().streams.find(call, handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (stream->is_capturing) call.breaks(0, "it captures");
    // The call returns at once. Work that waits for another stream is done later.
    const int code = run(*stream);
    state().streams.remove(call, handle);
    return code == WAITING ? SUCCESS : code;
}

EXPORTED int cuStreamSynchronize(void* handle) {
    Call call("cuStreamSynchronize", CONTEXT | (handle == nullptr ? LEGACY : NOTHING));
    if (call.refused) return call.refused;
    if (handle == nullptr) return run_legacy(*call.context);
    Stream* const stream = state().streams.find(call, handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (stream->is_capturing) {
        stream->is_invalidated = true;
        return call.breaks(CAPTURE_UNSUPPORTED, "the stream captures");
    }
    return finish(call, *stream);
}

// Finds the stream of a handle, and checks that it accepts work.
static int open_stream(const Judged& call, void* handle, Stream*& stream) {
    if (handle == nullptr) return call.breaks(INVALID_HANDLE, "the legacy default stream, which is not modelled here");
    stream = state().streams.find(call, handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (stream->context != state().contexts.find(call, current)) return call.breaks(INVALID_CONTEXT, "a stream of another context");
    if (stream->is_capturing && stream->is_invalidated) return CAPTURE_INVALIDATED;
    return SUCCESS;
}

bool is_capturing(const void* handle) {
    const auto found = state().streams.all.find((uint64_t)handle);
    return found != state().streams.all.end() && found->second->is_capturing;
}

void invalidate(void* handle) {
    const auto found = state().streams.all.find((uint64_t)handle);
    if (found != state().streams.all.end()) found->second->is_invalidated = true;
}

void capture(Event& event, uint64_t stream) {
    const Stream& on = *state().streams.all.at(stream);
    event.captured_on = stream;
    event.captured_after = on.joined + on.captured.size();
}

int capture_wait(const Judged& call, Stream& stream, const Event& event) {
    const auto found = state().streams.all.find(event.captured_on);
    if (found == state().streams.all.end() || !found->second->is_capturing)
        return call.breaks(CAPTURED_EVENT, "the event's last recording was captured, and the capture has ended");
    Stream& on = *found->second;
    const uint64_t origin = on.origin != 0 ? on.origin : event.captured_on;
    if (!stream.is_capturing) {
        // The stream joins the capture.
        stream.is_capturing = true;
        stream.is_invalidated = false;
        stream.mode = on.mode;
        stream.thread = on.thread;
        stream.origin = origin;
        stream.joined = 0;
        return SUCCESS;
    }
    // Items of another stream run where the origin waits for them, which is as late as possible.
    if (on.origin != 0 && &stream == state().streams.all.at(origin).get()) {
        const uint64_t count = event.captured_after > on.joined ? event.captured_after - on.joined : 0;
        for (uint64_t i = 0; i < count; ++i) stream.captured.push_back(std::move(on.captured[i]));
        on.captured.erase(on.captured.begin(), on.captured.begin() + long(count));
        on.joined += count;
    }
    return SUCCESS;
}

// Ends the capture of all streams that have joined the capture of `origin`. Returns true if some of their work was not
// waited for.
static bool end_joined(const void* origin) {
    bool is_unjoined = false;
    for (auto& [handle, stream] : state().streams.all) {
        if (stream->origin != (uint64_t)origin) continue;
        is_unjoined |= !stream->captured.empty();
        stream->captured.clear();
        stream->is_capturing = false;
        stream->origin = 0;
    }
    return is_unjoined;
}

EXPORTED int double_enqueue(const char* name, void* handle, const Work* work) {
    const Judged call{name};
    std::unique_lock<std::recursive_mutex> lock(state().lock);
    Stream* stream = nullptr;
    if (const int code = open_stream(call, handle, stream)) return code;
    if (stream->is_capturing) {
        stream->captured.push_back(*work);
    } else {
        stream->queue.push_back(*work);
    }
    return SUCCESS;
}

EXPORTED int cuStreamBeginCapture_v2(void* handle, int mode) {
    const Call call("cuStreamBeginCapture", INITIALIZED);
    if (call.refused) return call.refused;
    if (handle == nullptr) return call.breaks(CAPTURE_UNSUPPORTED, "the legacy default stream cannot capture");
    Stream* const stream = state().streams.find(call, handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (mode < 0 || mode > 2) return call.breaks(INVALID_VALUE, "mode %d", mode);
    if (stream->is_capturing) return call.breaks(INVALID_VALUE, "it captures already");
    stream->is_capturing = true;
    stream->is_invalidated = false;
    stream->mode = Mode(mode);
    stream->thread = std::this_thread::get_id();
    return SUCCESS;
}

EXPORTED int cuStreamEndCapture(void* handle, void** graph) {
    const Call call("cuStreamEndCapture", INITIALIZED);
    Stream* const stream = state().streams.find(call, handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (call.refused) {
        // The capture ends even if this call is refused.
        stream->is_capturing = false;
        end_joined(handle);
        stream->captured.clear();
        return call.refused;
    }
    if (graph == nullptr) return call.breaks(INVALID_VALUE, "nowhere to put the graph");
    if (!stream->is_capturing) return call.breaks(INVALID_VALUE, "it does not capture");
    if (stream->mode != Mode::RELAXED && stream->thread != std::this_thread::get_id())
        return call.breaks(CAPTURE_WRONG_THREAD, "begun by another thread");
    if (stream->origin != 0) return call.breaks(CAPTURE_UNMATCHED, "another stream has begun the capture");
    stream->is_capturing = false;
    const bool is_unjoined = end_joined(handle);
    Graph made;
    made.nodes.swap(stream->captured);
    *graph = nullptr;
    if (stream->is_invalidated) return CAPTURE_INVALIDATED;
    if (is_unjoined) return call.breaks(CAPTURE_UNJOINED, "work of another stream was not waited for");
    *graph = state().graphs.add(std::move(made));
    return SUCCESS;
}

EXPORTED int cuGraphInstantiateWithFlags(void** executable, void* handle, unsigned long long flags) {
    const Call call("cuGraphInstantiate", INITIALIZED);
    if (call.refused) return call.refused;
    const Graph* const graph = state().graphs.find(call, handle);
    if (graph == nullptr || executable == nullptr) return INVALID_VALUE;
    // AUTO_FREE_ON_LAUNCH, USE_NODE_PRIORITY
    if ((flags & ~(1ull | 8ull)) != 0) return call.breaks(INVALID_VALUE, "flags %llu", flags);
    Graph made;
    made.nodes = graph->nodes;
    made.bytes = (made.nodes.size() * NODE_BYTES + GRAPH_PAGE - 1) / GRAPH_PAGE * GRAPH_PAGE;
    *executable = state().executables.add(std::move(made));
    return SUCCESS;
}

// Calls a function of the host when the stream reaches it.
EXPORTED int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
    const Call call("cuLaunchHostFunc", CONTEXT);
    if (call.refused) return call.refused;
    if (function == nullptr) return call.breaks(INVALID_VALUE, "no function");
    const Work work{"a function of the host", [function, argument]() -> std::string {
                        function(argument);
                        return "";
                    },
                    false};
    return double_enqueue("cuLaunchHostFunc", stream, &work);
}

// Uploads a graph to the device. This takes memory, unless the graph was uploaded before.
static int upload(Stream& stream, void* handle, const Graph& graph) {
    if (graph.is_there) return SUCCESS;
    if (graph.bytes > total_bytes() - state().used) return OUT_OF_MEMORY;
    stream.queue.push_back({"a graph's upload", [handle]() -> std::string {
                                const auto found = state().executables.all.find((uint64_t)handle);
                                if (found == state().executables.all.end() || found->second->is_there) return "";
                                found->second->is_there = take(found->second->bytes);
                                return found->second->is_there ? "" : "there is no memory left for a graph";
                            }});
    return SUCCESS;
}

EXPORTED int cuGraphUpload(void* handle, void* stream_handle) {
    const Call call("cuGraphUpload", INITIALIZED | SAFE);
    if (call.refused) return call.refused;
    const Graph* const graph = state().executables.find(call, handle);
    if (graph == nullptr) return INVALID_VALUE;
    Stream* stream = nullptr;
    if (const int code = open_stream(call, stream_handle, stream)) return code;
    return upload(*stream, handle, *graph);
}

EXPORTED int cuGraphLaunch(void* handle, void* stream_handle) {
    const Call call("cuGraphLaunch", INITIALIZED);
    if (call.refused) return call.refused;
    const Graph* const graph = state().executables.find(call, handle);
    if (graph == nullptr) return INVALID_VALUE;
    Stream* stream = nullptr;
    if (const int code = open_stream(call, stream_handle, stream)) return code;
    if (const int code = stream->is_capturing ? SUCCESS : upload(*stream, handle, *graph)) return code;
    // The local memory of kernels is allocated at the first launch that needs it, and is then kept.
    const uint64_t local_bytes = double_setting("LOCAL_MEMORY", 0);
    if (stream->context->local_bytes < local_bytes) {
        if (!take(local_bytes - stream->context->local_bytes)) return OUT_OF_MEMORY;
        stream->context->local_bytes = local_bytes;
    }
    for (const Work& work : graph->nodes) {
        if (stream->is_capturing) {
            stream->captured.push_back(work);
        } else {
            stream->queue.push_back(work);
        }
    }
    return SUCCESS;
}

EXPORTED int cuGraphDestroy(void* handle) {
    const Call call("cuGraphDestroy", INITIALIZED);
    if (call.refused) return call.refused;
    return state().graphs.remove(call, handle) ? SUCCESS : INVALID_VALUE;
}

EXPORTED int cuGraphExecDestroy(void* handle) {
    const Call call("cuGraphExecDestroy", INITIALIZED);
    if (call.refused) return call.refused;
    const Graph* const graph = state().executables.find(call, handle);
    if (graph == nullptr) return INVALID_VALUE;
    if (graph->is_there) give(graph->bytes);
    state().executables.remove(call, handle);
    return SUCCESS;
}
