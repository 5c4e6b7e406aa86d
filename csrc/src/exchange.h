// How ranks give each other rows, through memory that their processes share (pst_exchange).
//
// Every rank has a line in that memory, where it says how many exchanges it has filled its slot for, and two slots, which
// take turns. Who fills a slot for exchange t has waited for everybody's t - 1, and they are done with t - 2 by then: so
// one wait is enough for each.
#pragma once

#include <algorithm>

#include "ops.h"
#include "pieces.h"
#include "waiting.h"

namespace pst {

static_assert(sizeof(pst_rank_line) == 64, "a line of the cache for each rank");

struct Exchange {
    pst_rank_line* lines;
    uint8_t* slots;
    int rank, size;
    int64_t slot_bytes, spin_ns;

    explicit Exchange(const pst_exchange& e)
        : lines(static_cast<pst_rank_line*>(e.memory)), slots(static_cast<uint8_t*>(e.memory) + PST_LINES_BYTES),
          rank(e.rank), size(e.size), slot_bytes(e.slot_bytes), spin_ns(int64_t(e.spin_us) * 1000) {}

    float* slot(uint32_t turn, int whose) const {
        return reinterpret_cast<float*>(slots + ((turn & 1) * size + whose) * slot_bytes);
    }
    // Of the next exchange. Threads ask ahead of the first barrier of an operation, and count by themselves from then on.
    uint32_t turn() const { return __atomic_load_n(&lines[rank].arrived, __ATOMIC_RELAXED) + 1; }

    // The slot of `whose` holds so many bytes for `turn`: everybody may read it.
    void arrive(int whose, uint32_t turn, int64_t bytes) const {
        pst_rank_line& line = lines[whose];
        line.filled[turn & 1] = uint64_t(bytes);
        move_on(line.arrived, line.sleepers, turn);
    }
    // Nanoseconds until all the others had arrived.
    int64_t await(uint32_t turn) const {
        int64_t waited = 0;
        for (int whose = 0; whose < size; whose++)
            if (whose != rank) waited += pst::await(lines[whose].arrived, lines[whose].sleepers, turn, spin_ns);
        return waited;
    }
    // `bytes`: that others have been given, once for each of them; `parts`: of others, that were merged.
    void count(int whose, int64_t bytes, int parts = 0) const {
        lines[whose].gathers++;
        lines[whose].bytes += uint64_t(bytes);
        lines[whose].merged += uint64_t(parts);
    }
    // All threads have put `filled` bytes into the slot: the others are told, and waited for.
    void meet(Team& team, uint32_t turn, int64_t filled, int64_t given, int parts = 0) const {
        team.barrier();
        if (team.id == 0) {
            count(rank, given, parts);
            arrive(rank, turn, filled);
        }
        const int64_t waited = await(turn);
        if (team.id == 0) lines[rank].waited += uint64_t(waited);
    }
};

// Throws Misfit for what no ranks can use.
void check_exchange(const pst_exchange& e);

// The columns that every rank has of a row, put side by side on all of them.
struct Columns {
    std::vector<int32_t> starts;  // of each rank's, and the width
    int32_t widest = 0;

    // A rank may have none. Throws Misfit unless a slot holds a row of them.
    Columns(const pst_exchange& e, const int32_t* widths);

    int32_t of(int rank) const { return starts[size_t(rank) + 1] - starts[size_t(rank)]; }

    // `give(row, from, to, piece)` writes columns from ... to-1 of a row's own to piece ... and wherever else they go;
    // `out(row)` is where the whole row lies, and gets what the others have.
    template <class Give, class Out>
    void gather(Team& team, const Exchange& exchange, uint32_t& turn, int64_t rows, Give give, Out out) const {
        const int64_t most = exchange.slot_bytes / (int64_t(widest) * 4);
        const int own = exchange.rank;
        for (int64_t first = 0; first < rows; first += most, turn++) {
            const int64_t count = std::min(most, rows - first), width = of(own), bytes = count * width * 4;
            float* slot = exchange.slot(turn, own);
            each_run(team, count, width, [&](int64_t row, int64_t from, int64_t to) {
                give(first + row, from, to, slot + row * width + from);
            });
            exchange.meet(team, turn, bytes, bytes * (exchange.size - 1));
            for (int r = 0; r < exchange.size; r++) {
                if (r == own) continue;
                const float* theirs = exchange.slot(turn, r);
                each_run(team, count, of(r), [&](int64_t row, int64_t from, int64_t to) {
                    std::copy(theirs + row * of(r) + from, theirs + row * of(r) + to,
                              out(first + row) + starts[size_t(r)] + from);
                });
            }
        }
    }
};

}  // namespace pst
