// The state of the fake NCCL.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "double.hpp"

// Values of nccl.h's ncclResult_t.
enum : int { NCCL_SUCCESS = 0, NCCL_INVALID_USAGE = 5, NCCL_IN_PROGRESS = 7 };

static constexpr unsigned MAGIC = 0xcafebeef;

// Structs with the layouts of nccl.h, version 2.18.
struct UniqueId {
    char bytes[128];
};
struct Config {
    size_t bytes;
    unsigned magic, version;
    int blocking, cluster, least_blocks, most_blocks;
    const char* network;
    int shares_resources;
};

// The identity of a message: its two ranks, and its index among all messages from one to the other.
struct Key {
    int from, to;
    uint64_t number;

    bool operator<(const Key& other) const { return std::tie(from, to, number) < std::tie(other.from, other.to, other.number); }
};

// The two ends of a message. An end's address is 0 until the end has been reached.
struct Ends {
    uint64_t from = 0, to = 0, sent = 0, received = 0;
    bool is_over = false;
    int seen = 0;
};

enum class Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

// A collective, with its count in elements per part.
struct Collective {
    Kind kind;
    uint64_t count;
    bool is_sum;
    int root;

    bool operator==(const Collective& other) const {
        return kind == other.kind && count == other.count && is_sum == other.is_sum && root == other.root;
    }
};

// The operands of a collective that ranks have provided so far.
struct Gathered {
    Collective what;
    std::vector<uint64_t> send, receive;
    int come = 0, seen = 0;
};

// The ranks of a communicator.
struct World {
    int size;
    std::vector<int> devices;
    int joined = 0, finalized = 0, with_collectives = 0;
    // Pairs of ranks that have exchanged messages. The first message between two ranks only completes once both have
    // started it.
    std::set<std::pair<int, int>> wishes;
    std::map<Key, Ends> messages;
    std::map<uint64_t, Gathered> collectives;

    explicit World(int ranks) : size(ranks), devices(size_t(ranks), -1) {}
};

// A rank's communicator handle.
struct Comm {
    std::shared_ptr<World> world;
    int rank, device;
    std::vector<uint64_t> sent, received;
    uint64_t collectives = 0;
    std::set<std::pair<int, int>> wishes;
    bool has_collectives = false, is_finalized = false;
    std::shared_ptr<std::atomic<bool>> is_aborted = std::make_shared<std::atomic<bool>>(false);

    Comm(std::shared_ptr<World> of, int number, int on)
        : world(std::move(of)), rank(number), device(on), sent(size_t(world->size)), received(size_t(world->size)) {}
};

// One end of a message.
struct Message {
    Comm* comm;
    void* stream;
    bool is_send;
    uint64_t address, bytes;
    Key key;
};
