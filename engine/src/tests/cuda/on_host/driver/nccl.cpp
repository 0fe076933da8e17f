// The fake NCCL, as far as ranks use it to exchange tensors: non-blocking communicators, messages that are matched by their
// order, and collectives. Written from NCCL's user guide.
#include "nccl.hpp"

// Held during every access to the shared state of ranks, which also happens while streams run.
struct Lock {
    Lock() { double_lock(1); }
    ~Lock() { double_lock(0); }
};

static std::map<std::string, std::shared_ptr<World>>& worlds() {
    static auto* const all = new std::map<std::string, std::shared_ptr<World>>;
    return *all;
}

// The calls of this thread since its group was started.
static thread_local int depth = 0;
static thread_local std::vector<Message> grouped;

EXPORTED int ncclGetVersion(int* version) {
    *version = 22800;
    return NCCL_SUCCESS;
}

EXPORTED int ncclGetUniqueId(UniqueId* id) {
    static std::atomic<uint64_t> next{1};
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "world %llu", (unsigned long long)next++);
    return NCCL_SUCCESS;
}

EXPORTED const char* ncclGetErrorString(int code) { return code == NCCL_SUCCESS ? "no error" : "invalid usage"; }

EXPORTED const char* ncclGetLastError(const Comm*) { return ""; }

EXPORTED int ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, const Config* config) {
    const Judged call{"ncclCommInitRankConfig"};
    if (const int code = double_called(call.name)) return code;
    const int device = double_device();
    if (device < 0) return call.breaks(NCCL_INVALID_USAGE, "no device is current to the thread");
    if (config->bytes != sizeof(Config) || config->magic != MAGIC || config->blocking != 0)
        return call.breaks(NCCL_INVALID_USAGE, "a configuration that is not understood");
    const Lock lock;
    std::shared_ptr<World>& world = worlds()[id.bytes];
    if (world == nullptr) world = std::make_shared<World>(size);
    if (world->size != size || rank < 0 || rank >= size || world->devices[rank] >= 0)
        return call.breaks(NCCL_INVALID_USAGE, "rank %d of %d", rank, size);
    for (const int other : world->devices) {
        if (other == device) return call.breaks(NCCL_INVALID_USAGE, "two ranks on GPU %d", device);
    }
    world->devices[rank] = device;
    ++world->joined;
    *comm = new Comm(world, rank, device);
    double_exists("communicator of NCCL", 1, 0);
    return NCCL_IN_PROGRESS;
}

// True if all earlier calls have completed: ranks have joined or left, and are connected to the ranks with which they
// exchange messages.
static bool is_through(const Comm& comm) {
    const World& world = *comm.world;
    if (world.joined < world.size || (comm.is_finalized && world.finalized < world.size)) return false;
    for (const auto& [from, to] : comm.wishes) {
        if (world.wishes.count({to, from}) == 0) return false;
    }
    return !comm.has_collectives || world.with_collectives == world.size;
}

EXPORTED int ncclCommGetAsyncError(const Comm* comm, int* state) {
    const Lock lock;
    *state = is_through(*comm) ? NCCL_SUCCESS : NCCL_IN_PROGRESS;
    return NCCL_SUCCESS;
}

// Returns an error for a call that the communicator does not allow in its current state.
static int enter(const Judged& call, const Comm* comm) {
    if (const int code = double_called(call.name)) return code;
    if (comm == nullptr) return call.breaks(NCCL_INVALID_USAGE, "no communicator");
    if (double_device() != comm->device) return call.breaks(NCCL_INVALID_USAGE, "another device is current to the thread");
    const Lock lock;
    if (!is_through(*comm)) return call.breaks(NCCL_INVALID_USAGE, "before it is through with what was called");
    if (comm->is_finalized) return call.breaks(NCCL_INVALID_USAGE, "after the end");
    return NCCL_SUCCESS;
}

EXPORTED int ncclCommFinalize(Comm* comm) {
    const Judged call{"ncclCommFinalize"};
    if (const int code = enter(call, comm)) return code;
    const Lock lock;
    for (const auto& [key, ends] : comm->world->messages) {
        const bool is_own = (key.from == comm->rank && ends.from != 0) || (key.to == comm->rank && ends.to != 0);
        if (is_own && !ends.is_over) call.breaks(0, "a message is under way");
    }
    comm->is_finalized = true;
    ++comm->world->finalized;
    return NCCL_IN_PROGRESS;
}

EXPORTED int ncclCommDestroy(Comm* comm) {
    const Judged call{"ncclCommDestroy"};
    const Lock lock;
    if (!comm->is_finalized || !is_through(*comm)) call.breaks(0, "it has not ended");
    double_exists("communicator of NCCL", -1, 0);
    delete comm;
    return NCCL_SUCCESS;
}

EXPORTED int ncclCommAbort(Comm* comm) {
    const Lock lock;
    *comm->is_aborted = true;
    double_exists("communicator of NCCL", -1, 0);
    delete comm;
    return NCCL_SUCCESS;
}

// Exchanges the messages of which both ends have been reached. Returns WAITS unless all messages are done.
static std::string exchange(World& world, const std::vector<Message>& messages) {
    const Lock lock;
    bool is_over = true;
    for (const Message& message : messages) {
        Ends& ends = world.messages[message.key];
        (message.is_send ? ends.from : ends.to) = message.address;
        (message.is_send ? ends.sent : ends.received) = message.bytes;
        if (ends.from == 0 || ends.to == 0) {
            is_over = false;
            continue;
        }
        if (ends.sent != ends.received) return "a message whose ends differ in size";
        if (!ends.is_over) {
            double_window(1);
            memmove((void*)ends.to, (const void*)ends.from, ends.sent);
            double_window(0);
        }
        ends.is_over = true;
    }
    if (!is_over) return Work::WAITS;
    for (const Message& message : messages) {
        const auto found = world.messages.find(message.key);
        if (++found->second.seen == 2) world.messages.erase(found);
    }
    return "";
}

static int launch(const Judged& call, Comm* comm, void* stream, std::vector<Message> messages) {
    {
        const Lock lock;
        for (Message& message : messages) {
            const int peer = message.is_send ? message.key.to : message.key.from;
            // Messages between two ranks match by index: the third one that is sent to a rank matches the third one
            // that this rank receives.
            message.key.number = (message.is_send ? comm->sent : comm->received)[peer]++;
            comm->wishes.insert({comm->rank, peer});
            comm->world->wishes.insert({comm->rank, peer});
        }
    }
    const Work work = {call.name, [world = comm->world, aborted = comm->is_aborted, messages] {
                           return *aborted ? std::string() : exchange(*world, messages);
                       },
                       false};
    return double_enqueue(call.name, stream, &work) == SUCCESS ? NCCL_IN_PROGRESS : NCCL_INVALID_USAGE;
}

static int message(const Judged& call, Comm* comm, bool is_send, uint64_t address, uint64_t bytes, int peer, void* stream) {
    if (const int code = enter(call, comm)) return code;
    if (peer < 0 || peer >= comm->world->size) return call.breaks(NCCL_INVALID_USAGE, "rank %d", peer);
    if (bytes == 0 || !double_is_accessible(address, bytes))
        return call.breaks(NCCL_INVALID_USAGE, "%llu bytes: not all on the device", (unsigned long long)bytes);
    const Key key = is_send ? Key{comm->rank, peer, 0} : Key{peer, comm->rank, 0};
    const Message message = {comm, stream, is_send, address, bytes, key};
    if (depth == 0) return launch(call, comm, stream, {message});
    grouped.push_back(message);
    return NCCL_SUCCESS;
}

static constexpr int BYTES = 1, F32 = 7, SUM = 0;

EXPORTED int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
    const Judged call{"ncclSend"};
    if (type != BYTES) return call.breaks(NCCL_INVALID_USAGE, "type %d", type);
    return message(call, comm, true, (uint64_t)from, count, peer, stream);
}

EXPORTED int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
    const Judged call{"ncclRecv"};
    if (type != BYTES) return call.breaks(NCCL_INVALID_USAGE, "type %d", type);
    return message(call, comm, false, (uint64_t)to, count, peer, stream);
}

EXPORTED int ncclGroupStart() {
    ++depth;
    return NCCL_SUCCESS;
}

EXPORTED int ncclGroupEnd() {
    const Judged call{"ncclGroup"};
    if (depth == 0) return call.breaks(NCCL_INVALID_USAGE, "no group was started");
    if (--depth > 0 || grouped.empty()) return NCCL_SUCCESS;
    std::vector<Message> all;
    all.swap(grouped);
    Comm* const comm = all[0].comm;
    void* const stream = all[0].stream;
    for (const Message& message : all) {
        if (message.comm != comm || message.stream != stream)
            return call.breaks(NCCL_INVALID_USAGE, "of several communicators or streams: not modelled here");
    }
    return launch(call, comm, stream, std::move(all));
}

// Computes the results of a collective. Called once all ranks have provided their operands.
static void finish(const Gathered& gathered) {
    const Collective& what = gathered.what;
    const uint64_t size = gathered.send.size(), width = what.is_sum ? sizeof(float) : 1;
    std::vector<char> whole;
    if (what.is_sum) {
        // NCCL does not specify the order of summation. This implementation sums from the last rank to the first.
        const uint64_t count = what.kind == Kind::REDUCE_SCATTER ? what.count * size : what.count;
        std::vector<float> sums(count, 0.0f);
        for (uint64_t rank = size; rank-- > 0;) {
            for (uint64_t i = 0; i < count; ++i) sums[i] += ((const float*)gathered.send[rank])[i];
        }
        whole.assign((const char*)sums.data(), (const char*)(sums.data() + count));
    } else if (what.kind == Kind::BROADCAST) {
        const char* const from = (const char*)gathered.send[what.root];
        whole.assign(from, from + what.count);
    } else {
        for (const uint64_t send : gathered.send) whole.insert(whole.end(), (const char*)send, (const char*)send + what.count);
    }
    for (uint64_t rank = 0; rank < size; ++rank) {
        const bool is_part = what.kind == Kind::REDUCE_SCATTER;
        const uint64_t bytes = what.count * width;
        memcpy((void*)gathered.receive[rank], whole.data() + (is_part ? rank * bytes : 0), is_part ? bytes : whole.size());
    }
}

static std::string take_part(World& world, uint64_t number, int rank, const Collective& what, uint64_t send, uint64_t receive) {
    const Lock lock;
    Gathered& gathered = world.collectives[number];
    if (gathered.come == 0) {
        gathered.what = what;
        gathered.send.resize(size_t(world.size)), gathered.receive.resize(size_t(world.size));
    }
    if (gathered.receive[size_t(rank)] == 0) {
        if (!(gathered.what == what)) return "ranks start different collectives";
        gathered.send[size_t(rank)] = send;
        gathered.receive[size_t(rank)] = receive;
        if (++gathered.come == world.size) {
            double_window(1);
            finish(gathered);
            double_window(0);
        }
    }
    if (gathered.come < world.size) return Work::WAITS;
    if (++gathered.seen == world.size) world.collectives.erase(number);
    return "";
}

static int collective(const Judged& call, Comm* comm, const Collective& what, const void* send, void* receive, void* stream) {
    if (const int code = enter(call, comm)) return code;
    if (depth != 0) return call.breaks(NCCL_INVALID_USAGE, "in a group: not modelled here");
    const uint64_t size = uint64_t(comm->world->size), part = what.count * (what.is_sum ? sizeof(float) : 1);
    const uint64_t sent = what.kind == Kind::REDUCE_SCATTER ? part * size : part;
    const uint64_t received = what.kind == Kind::ALL_GATHER ? part * size : part;
    if (what.count == 0 || !double_is_accessible((uint64_t)send, sent) || !double_is_accessible((uint64_t)receive, received))
        return call.breaks(NCCL_INVALID_USAGE, "%llu elements: not all on the device", (unsigned long long)what.count);
    uint64_t number;
    {
        const Lock lock;
        number = comm->collectives++;
        if (!comm->has_collectives) ++comm->world->with_collectives;
        comm->has_collectives = true;
    }
    const Work work = {call.name, [=, world = comm->world, aborted = comm->is_aborted, rank = comm->rank] {
                           if (*aborted) return std::string();
                           return take_part(*world, number, rank, what, (uint64_t)send, (uint64_t)receive);
                       },
                       false};
    return double_enqueue(call.name, stream, &work) == SUCCESS ? NCCL_IN_PROGRESS : NCCL_INVALID_USAGE;
}

EXPORTED int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, Comm* comm, void* stream) {
    const Judged call{"ncclAllReduce"};
    if (type != F32 || op != SUM) return call.breaks(NCCL_INVALID_USAGE, "type %d, operation %d", type, op);
    return collective(call, comm, {Kind::ALL_REDUCE, count, true, 0}, send, receive, stream);
}

EXPORTED int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, Comm* comm, void* stream) {
    const Judged call{"ncclReduceScatter"};
    if (type != F32 || op != SUM) return call.breaks(NCCL_INVALID_USAGE, "type %d, operation %d", type, op);
    return collective(call, comm, {Kind::REDUCE_SCATTER, count, true, 0}, send, receive, stream);
}

EXPORTED int ncclAllGather(const void* send, void* receive, size_t count, int type, Comm* comm, void* stream) {
    const Judged call{"ncclAllGather"};
    if (type != BYTES) return call.breaks(NCCL_INVALID_USAGE, "type %d", type);
    return collective(call, comm, {Kind::ALL_GATHER, count, false, 0}, send, receive, stream);
}

EXPORTED int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Comm* comm, void* stream) {
    const Judged call{"ncclBroadcast"};
    if (type != BYTES) return call.breaks(NCCL_INVALID_USAGE, "type %d", type);
    return collective(call, comm, {Kind::BROADCAST, count, false, root}, send, receive, stream);
}
