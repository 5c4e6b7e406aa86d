// Threads that run one function together, and how they wait for each other.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <ctime>
#include <cstdint>
#include <memory>
#include <vector>

#include "penstock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pst {

// While another thread, or rank, is waited for.
inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// A thread's share of an operation's pieces: low half, how many it has taken itself, from the first one on; high half,
// how many others have taken, from the last one on.
struct alignas(64) Share {
    std::atomic<uint64_t> taken{0};
};

// What the threads of one run share. On cache lines of their own: every thread hammers them.
struct Shared {
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int32_t> arrived{0};
    alignas(64) std::atomic<int32_t> sleepers{0};
    int64_t spin_ns = 0;
    int32_t size = 1;
    std::unique_ptr<Share[]> shares;  // [size]
};

// One running thread of a team.
struct Team {
    Team(int id, int size, Shared* shared) : id(id), size(size), shared(shared) {}

    int id;
    int size;
    Shared* shared;
    int asked = 0;  // shares that have been found empty, one's own first

    // Everybody has arrived, and sees what the others wrote before. Work is counted from zero again.
    void barrier();

    // The next `grain` of `count` pieces of work that nobody has begun: first ... last-1. False when none are left.
    // Every count needs a barrier before it (an operation is entered behind one). Each thread has a share of its own,
    // from front to back, so that it reads memory in one stream; once through, it helps others, from back to front. So
    // who is slow, or not running at all, delays the others by one piece.
    bool next(int64_t grain, int64_t count, int64_t& first, int64_t& last) {
        if (size == 1) {
            if (asked) return false;
            asked = 1;
            first = 0;
            last = count;
            return count > 0;
        }
        const int64_t pieces = (count + grain - 1) / grain;
        for (; asked < size; asked++) {
            const int whose = id + asked < size ? id + asked : id + asked - size;
            const int64_t begin = pieces * whose / size, held = pieces * (whose + 1) / size - begin;
            std::atomic<uint64_t>& taken = shared->shares[size_t(whose)].taken;
            if (used(taken.load(std::memory_order_relaxed)) >= held) continue;
            const uint64_t before = taken.fetch_add(asked ? ONE_FROM_BEHIND : 1, std::memory_order_relaxed);
            if (used(before) >= held) continue;
            const int64_t piece = asked ? begin + held - 1 - int64_t(before >> 32) : begin + int64_t(uint32_t(before));
            first = piece * grain;
            last = first + grain < count ? first + grain : count;
            return true;
        }
        return false;
    }

    // The first piece of this thread's share of so many; -1 if it has none.
    int64_t own_piece(int64_t pieces) const {
        const int64_t begin = pieces * id / size;
        return begin < pieces * (id + 1) / size ? begin : -1;
    }

  private:
    static constexpr uint64_t ONE_FROM_BEHIND = uint64_t(1) << 32;
    static int64_t used(uint64_t taken) { return int64_t(uint32_t(taken)) + int64_t(taken >> 32); }
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
    uint64_t* progress = nullptr;  // see pst_pool_watch; thread 0 alone writes it
    alignas(64) std::atomic<uint32_t> jobs{0};
    std::atomic<int32_t> waiting{0};

    // Run `work(team, argument)` on every thread; back when all are done. One run at a time. In a process forked from
    // the owner's, where the workers do not exist, the caller does it all.
    void run(pst::Work work, void* argument);
};
