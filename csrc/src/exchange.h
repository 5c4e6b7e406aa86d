// Memory in which the ranks of a host tell each other what they have given (pst_exchange).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

#include "penstock.h"
#include "pool.h"

namespace pst {

static_assert(sizeof(pst_rank_line) == 64, "a line of the cache for each rank");

struct Exchange {
    pst_rank_line* lines;
    uint8_t* slots;
    int rank, size;
    int64_t slot_bytes, spin_ns;

    Exchange(const pst_exchange& e)
        : lines(static_cast<pst_rank_line*>(e.memory)), slots(static_cast<uint8_t*>(e.memory) + PST_LINES_BYTES),
          rank(e.rank), size(e.size), slot_bytes(e.slot_bytes), spin_ns(int64_t(e.spin_us) * 1000) {}

    float* slot(uint32_t turn, int whose) const {
        return reinterpret_cast<float*>(slots + ((turn & 1) * size + whose) * slot_bytes);
    }
    // Of the next gather.
    uint32_t turn() const { return __atomic_load_n(&lines[rank].arrived, __ATOMIC_RELAXED) + 1; }

    // The slot of `whose` holds so many bytes for `turn`: everybody may read it.
    void arrive(uint32_t turn, int64_t bytes) const { arrive(rank, turn, bytes); }
    // Whoever arrives looks at `sleepers` after it; whoever sleeps counts itself before the kernel compares.
    void arrive(int whose, uint32_t turn, int64_t bytes) const {
        pst_rank_line& line = lines[whose];
        line.filled[turn & 1] = uint64_t(bytes);
        __atomic_store_n(&line.arrived, turn, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&line.sleepers, __ATOMIC_SEQ_CST)) wake(line);
    }
    static void wake(pst_rank_line& line) {
        syscall(SYS_futex, &line.arrived, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
    }
    static bool is_there(uint32_t arrived, uint32_t turn) { return int32_t(arrived - turn) >= 0; }

    // All the others.
    void await(uint32_t turn) const {
        for (int whose = 0; whose < size; whose++)
            if (whose != rank) await(lines[whose], turn);
    }
    void await(pst_rank_line& line, uint32_t turn) const { await(line, turn, nullptr); }
    // False: `stop` was set meanwhile. Whoever sets it wakes the line, and comes in a moment where that was too early.
    bool await(pst_rank_line& line, uint32_t turn, const int32_t* stop) const {
        const timespec moment{1, 0};
        int64_t until = 0;
        for (;;) {
            for (int i = 0; i < 64; i++) {
                if (is_there(__atomic_load_n(&line.arrived, __ATOMIC_ACQUIRE), turn)) return true;
                relax();
            }
            const int64_t now = now_ns();
            if (!until) until = now + spin_ns;
            if (now >= until) break;
        }
        __atomic_fetch_add(&line.sleepers, 1, __ATOMIC_SEQ_CST);
        for (uint32_t seen; !is_there(seen = __atomic_load_n(&line.arrived, __ATOMIC_SEQ_CST), turn);) {
            if (stop && __atomic_load_n(stop, __ATOMIC_SEQ_CST)) break;
            syscall(SYS_futex, &line.arrived, FUTEX_WAIT, seen, stop ? &moment : nullptr, nullptr, 0);
        }
        __atomic_fetch_sub(&line.sleepers, 1, __ATOMIC_SEQ_CST);
        return is_there(__atomic_load_n(&line.arrived, __ATOMIC_ACQUIRE), turn);
    }
    void count(int64_t bytes) const { count(rank, bytes); }
    void count(int whose, int64_t bytes) const {
        lines[whose].gathers++;
        lines[whose].bytes += uint64_t(bytes);
    }
};

}  // namespace pst
