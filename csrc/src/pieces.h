// Rows of registers, cut into pieces that the threads of a team take in turn, and loops over one piece.
#pragma once

#include <algorithm>

#include "ops.h"
#include "simd.h"

namespace pst {

// Where the rows of a register are.
struct View {
    float* data;
    int64_t stride;
    int32_t width;

    explicit View(const pst_register& r) : data(r.data), stride(r.stride), width(r.width) {
        check(width > 0, "a register has a width");
    }
    float* row(int64_t i) const { return data + i * stride; }
};

// Numbers of a row that one thread takes at least: a claim costs as much as some hundred of them. A multiple of the
// lanes, so that a number's lane does not depend on how its row was cut.
constexpr int64_t PIECE = 4096;

// `body(row, from, to)` for columns from ... to-1, all rows x width shared out: long rows in pieces, short ones several
// at a time.
template <class Body>
void each_piece(Team& team, int64_t rows, int64_t width, Body body) {
    int64_t pieces = (width + PIECE - 1) / PIECE, grain = std::max<int64_t>(1, PIECE / width);
    for (int64_t first, last; team.next(grain, rows * pieces, first, last);)
        for (int64_t i = first; i < last; i++) {
            int64_t from = i % pieces * PIECE;
            body(i / pieces, from, std::min(from + PIECE, width));
        }
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

template <class Each>
inline void map(const float* x, float* out, int64_t n, Each each) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, each(load(x + i)));
    if (i < n) store(out + i, each(load(x + i, int(n - i))), int(n - i));
}

template <class Each>
inline void map(const float* x, const float* y, float* out, int64_t n, Each each) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, each(load(x + i), load(y + i)));
    if (i < n) store(out + i, each(load(x + i, int(n - i)), load(y + i, int(n - i))), int(n - i));
}

}  // namespace pst
