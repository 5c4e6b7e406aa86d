// Memory through which ranks tell each other what they have computed: see pst_exchange.
//
// Every rank has a line in that memory, where it says how many gathers it has filled its slot for, and two slots, which
// take turns. Who fills a slot for gather t has waited for everybody's t - 1, and they are done with t - 2 by then: so
// one wait is enough for each.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ops.h"
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

    // Whoever arrives looks at `sleepers` after it; whoever sleeps counts itself before the kernel compares.
    void arrive(uint32_t turn) const {
        pst_rank_line& own = lines[rank];
        __atomic_store_n(&own.arrived, turn, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&own.sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &own.arrived, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
    }
    static bool is_there(uint32_t arrived, uint32_t turn) { return int32_t(arrived - turn) >= 0; }

    void await(uint32_t turn) const {
        for (int whose = 0; whose < size; whose++)
            if (whose != rank) await(lines[whose], turn);
    }
    void await(pst_rank_line& line, uint32_t turn) const {
        int64_t until = 0;
        for (;;) {
            for (int i = 0; i < 64; i++) {
                if (is_there(__atomic_load_n(&line.arrived, __ATOMIC_ACQUIRE), turn)) return;
                relax();
            }
            const int64_t now = now_ns();
            if (!until) until = now + spin_ns;
            if (now >= until) break;
        }
        __atomic_fetch_add(&line.sleepers, 1, __ATOMIC_SEQ_CST);
        for (uint32_t seen; !is_there(seen = __atomic_load_n(&line.arrived, __ATOMIC_SEQ_CST), turn);)
            syscall(SYS_futex, &line.arrived, FUTEX_WAIT, seen, nullptr, nullptr, 0);
        __atomic_fetch_sub(&line.sleepers, 1, __ATOMIC_SEQ_CST);
    }
    void count(int64_t bytes, int parts = 0) const {
        lines[rank].gathers++;
        lines[rank].bytes += uint64_t(bytes);
        lines[rank].merged += uint64_t(parts);
    }
};

inline void check_exchange(const pst_exchange& e) {
    check(e.memory && e.size > 1 && e.size <= PST_MAX_RANKS, "ranks share memory, and there are at least two");
    check(e.rank >= 0 && e.rank < e.size, "a rank is one of them");
    check(e.slot_bytes >= 64 && e.slot_bytes % 64 == 0, "slots are lines of the cache");
}

// This thread's part of `rows` x `width`, fixed: rows, or columns where there are few of them.
template <class Body>
void each_run(const Team& team, int64_t rows, int64_t width, Body body) {
    if (rows >= team.size) {
        for (int64_t row = rows * team.id / team.size; row < rows * (team.id + 1) / team.size; row++)
            body(row, 0, width);
        return;
    }
    const int64_t from = width * team.id / team.size, to = width * (team.id + 1) / team.size;
    for (int64_t row = 0; row < rows && from < to; row++) body(row, from, to);
}

}  // namespace pst
