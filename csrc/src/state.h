// Where sequences keep a state, and how the work on states is shared out.
//
// A state's numbers lie side by side where they are advanced together, so tokens go by one after the other while the
// numbers of one run stay in the innermost cache; runs do not know each other. So a token's arithmetic has one order
// however a text is cut into steps.
#pragma once

#include <algorithm>

#include "cache.h"
#include "pieces.h"

namespace pst {

// A plane of a slot group, at one layer.
struct Slots {
    pst_plane plane;
    int group, layer;

    Slots(const pst_op& op, const Maker& maker, int number, int64_t count)
        : plane(maker.plane(op.n[0], number)), group(op.n[0]), layer(op.n[1]) {
        check(layer >= 0, "no such layer");
        check(plane.dtype == PST_F32 && int64_t(plane.heads) * plane.dim == count && plane.head_stride == plane.dim,
              "a plane does not hold this state");
    }
    float* of(const pst_step& step, int sequence) const {
        int64_t page = Pages(step.groups[group], sequence, layer).page(0);
        return static_cast<float*>(plane.data) + page * plane.page_stride;
    }
};

// The tokens of one sequence: first ... last-1 of the step.
struct Run {
    int64_t first, last;
    bool fresh;

    Run(const pst_step& step, int sequence)
        : first(step.query_start_loc[sequence]), last(step.query_start_loc[sequence + 1]),
          fresh(first < last && step.positions[first] == 0) {}
    int64_t count() const { return last - first; }
};

// `body(sequence, run, part)` for every part 0 ... parts-1 of every sequence with tokens.
template <class Body>
void each_part(Team& team, const pst_step& step, int64_t parts, Body body) {
    int64_t total = step.num_seqs * parts, grain = std::max<int64_t>(1, total / (32 * team.size));
    for (int64_t i, end; team.next(grain, total, i, end);)
        for (; i < end; i++) {
            Run run(step, int(i / parts));
            if (run.count() > 0) body(int(i / parts), run, int(i % parts));
        }
}

inline void check_tokens(const pst_register& r, int64_t width) {
    check(r.rows == PST_ROWS_TOKENS, "a state is advanced by all tokens");
    check(r.width == width, "a register does not fit its state");
}

OpPtr make_conv(const pst_op& op, const Maker& maker);     // state_rows.cpp: PST_CONV, SHIFT
OpPtr make_shift(const pst_op& op, const Maker& maker);
OpPtr make_channels(const pst_op& op, const Maker& maker);  // state_channels.cpp: PST_SCAN, WKV4
OpPtr make_diagonal(const pst_op& op, const Maker& maker);  // state_diagonal.cpp: PST_RG_LRU, DIAGONAL
OpPtr make_mlstm_gates(const pst_op& op, const Maker& maker);  // state_mlstm.cpp: PST_MLSTM_GATES
OpPtr make_heads(const pst_op& op, const Maker& maker);     // state_heads.cpp: PST_SCAN2, RECURRENT, WKV6, WKV7, DELTA, MLSTM

}  // namespace pst
