// Threads that run one function together, and how they wait for each other.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "penstock.h"

namespace pst {

// What the threads of one run share. On cache lines of their own: every thread hammers them.
struct Shared {
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int32_t> arrived{0};
    alignas(64) std::atomic<int64_t> counter{0};
    alignas(64) std::atomic<int32_t> sleepers{0};
    int64_t spin_ns = 0;
    int32_t size = 1;
};

// One running thread of a team.
struct Team {
    int id;
    int size;
    Shared* shared;

    // Everybody has arrived, and sees what the others wrote before. Work is counted from zero again.
    void barrier();

    // The next `grain` of `count` pieces of work that nobody has begun: first ... last-1. False when none are left.
    // Every count needs a barrier before it (an operation is entered behind one). Who is slow, or not running at all,
    // delays the others by one piece.
    bool next(int64_t grain, int64_t count, int64_t& first, int64_t& last) {
        if (size == 1) {
            if (shared->counter.load(std::memory_order_relaxed)) return false;
            shared->counter.store(1, std::memory_order_relaxed);
            first = 0;
            last = count;
            return count > 0;
        }
        first = shared->counter.fetch_add(grain, std::memory_order_relaxed);
        last = first + grain < count ? first + grain : count;
        return first < count;
    }
};

using Work = void (*)(Team&, void*);

}  // namespace pst

struct pst_pool {
    pst::Shared shared;
    int threads = 1;
    bool pin = false;
    pid_t owner = 0;
    std::vector<pthread_t> workers;
    pst::Work work = nullptr;  // null: the workers end
    void* argument = nullptr;
    alignas(64) std::atomic<uint32_t> jobs{0};
    std::atomic<int32_t> waiting{0};

    // Run `work(team, argument)` on every thread; back when all are done. One run at a time. In a process forked from
    // the owner's, where the workers do not exist, the caller does it all.
    void run(pst::Work work, void* argument);
};
