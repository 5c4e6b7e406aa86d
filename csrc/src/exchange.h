// How ranks give each other rows, through memory that their processes share: what PST_GATHER and PST_EXPERTS have in common.
//
// Every rank has a line in that memory, where it says how many exchanges it has filled its slot for, and two slots, which
// take turns. Who fills a slot for exchange t has waited for everybody's t - 1, and they are done with t - 2 by then: so
// one wait is enough for each.
#pragma once

#include <algorithm>

#include "ops.h"

namespace pst {

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

    void arrive(uint32_t turn) const;
    void await(uint32_t turn) const;
    // All threads have filled the slot: the others are told, `bytes` counted, and waited for.
    void meet(Team& team, uint32_t turn, int64_t bytes) const;

  private:
    void await(pst_rank_line& line, uint32_t turn) const;
};

// Throws Misfit for what no ranks can use.
void check_exchange(const pst_exchange& e);

// This thread's part of `rows` x `width`, fixed: rows, or columns where there are few of them.
template <class Body>
void each_run(const Team& team, int64_t rows, int64_t width, Body body) {
    if (rows >= team.size) {
        for (int64_t row = rows * team.id / team.size; row < rows * (team.id + 1) / team.size; row++) body(row, 0, width);
        return;
    }
    const int64_t from = width * team.id / team.size, to = width * (team.id + 1) / team.size;
    for (int64_t row = 0; row < rows && from < to; row++) body(row, from, to);
}

// The columns that every rank has of a row, put side by side on all of them.
struct Columns {
    std::vector<int32_t> starts;  // of each rank's, and the width
    int32_t widest = 0;

    // Throws Misfit unless every rank has some, and a slot holds a row of them.
    Columns(const pst_exchange& e, const int32_t* widths);

    int32_t of(int rank) const { return starts[size_t(rank) + 1] - starts[size_t(rank)]; }

    // `give(row, from, to, piece)` writes columns from ... to-1 of a row's own to piece ... and wherever else they go;
    // `out(row)` is where the whole row lies, and gets what the others have.
    template <class Give, class Out>
    void gather(Team& team, const Exchange& exchange, uint32_t& turn, int64_t rows, Give give, Out out) const {
        const int64_t most = exchange.slot_bytes / (int64_t(widest) * 4);
        const int own = exchange.rank;
        for (int64_t first = 0; first < rows; first += most, turn++) {
            const int64_t count = std::min(most, rows - first), width = of(own);
            float* slot = exchange.slot(turn, own);
            each_run(team, count, width, [&](int64_t row, int64_t from, int64_t to) {
                give(first + row, from, to, slot + row * width + from);
            });
            exchange.meet(team, turn, count * width * 4 * (exchange.size - 1));
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
