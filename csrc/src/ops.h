// What an operation of a program is to the interpreter.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock.h"
#include "pool.h"

namespace pst {

// Something of an operation does not fit; the sentence reaches the caller of pst_program_new.
struct Misfit : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void check(bool fits, const char* sentence) {
    if (!fits) throw Misfit(sentence);
}

// What a program knows when its operations are made.
struct Maker {
    const std::vector<pst_register>& registers;
    const std::vector<std::vector<pst_plane>>& planes;  // [group][plane]
    int32_t max_tokens, max_rows, threads;

    const pst_register& reg(int32_t number) const {
        check(number >= 0 && size_t(number) < registers.size(), "no such register");
        return registers[size_t(number)];
    }
    int32_t capacity(const pst_register& r) const { return r.rows == PST_ROWS_TOKENS ? max_tokens : max_rows; }
    const pst_plane& plane(int32_t group, int32_t number) const {
        check(group >= 0 && size_t(group) < planes.size(), "no such cache group");
        check(number >= 0 && size_t(number) < planes[size_t(group)].size(), "no such plane");
        return planes[size_t(group)][size_t(number)];
    }
};

// The sequences of a step whose first pages are the same ones: see prefixes.cpp.
struct Prefixes {
    int count = 0;                    // of `order`
    const int32_t* order = nullptr;   // sequences, those with the same pages beside each other
    const int32_t* common = nullptr;  // how many tokens each has in common with the one before it, all of them cached
};

// What an operation may look at while it runs. Scratch is 64-byte aligned, as large as it asked for, and holds nothing
// when it begins.
struct Context {
    const pst_step& step;
    uint8_t* shared_scratch;  // one for all threads
    uint8_t* own_scratch;     // this thread's
    const Prefixes* prefixes;  // [groups]
    int64_t* keys_read;       // this thread's counts, see pst_program_keys_read and _shared

    // Where the token of a row stands.
    int64_t position(const pst_register& r, int64_t row) const {
        return step.positions[r.rows == PST_ROWS_TOKENS ? row : step.rows[row]];
    }
    int32_t rows(const pst_register& r) const { return r.rows == PST_ROWS_TOKENS ? step.num_tokens : step.num_rows; }
};

// Every thread of a team calls `run`. It is entered behind a barrier and need not end with one. It never allocates,
// throws or looks at anything a step did not bring.
struct Op {
    virtual ~Op() = default;
    virtual void run(Team& team, const Context& context) const = 0;
    // Called while the operation before this one ends, ahead of the barrier: a hint to fetch what `run` reads first.
    virtual void warm(const Team&, const Context&) const {}
    // Between runs: the panels of matrix `index` of the operation's p[pointer] lie at `data` from now on. False: it has none.
    virtual bool move(int32_t pointer, int32_t index, const void* data) {
        return (void)pointer, (void)index, (void)data, false;
    }
    int64_t shared_bytes = 0;
    int64_t own_bytes = 0;
    bool keeps_state = false;  // which follows one path: it runs no trees
    int shares_group = -1;     // the group whose Prefixes it looks at
    int held_group = -1;       // the group of which it needs to know which blocks are here: pst_group.held
};

using OpPtr = std::unique_ptr<Op>;

// pointwise.cpp: PST_EMBED, SELECT, ADD, MUL, SCALE, CLIP, SOFT_CAP, ACT, GATED, GATE_ROWS, SCALE_QUERIES, ARGMAX;
// norm.cpp: PST_NORM; linear.cpp: PST_LINEAR; latent.cpp: PST_LATENT; rotary.cpp: PST_ROPE; attention.cpp: PST_WRITE,
// PST_ATTEND, ATTEND_PART; choose.cpp: PST_CHOOSE; rehearse.cpp: PST_REHEARSE; route.cpp: PST_ROUTE; experts.cpp: PST_EXPERTS; streams.cpp: PST_STREAMS, MATCH,
// CUT_OFF; connections.cpp and entries.cpp: those of weighed streams, and of entries; adapt.cpp, adapt_codes.cpp: PST_ADAPT, ADAPT_CODES; gather.cpp: PST_GATHER;
// merge.cpp: PST_MERGE; channel.cpp: PST_SEND, RECEIVE;
// attend_text.cpp: PST_ATTEND_TEXT; state.h: those with states.
// Each throws Misfit.
OpPtr make_pointwise(const pst_op& op, const Maker& maker);
OpPtr make_norm(const pst_op& op, const Maker& maker);
OpPtr make_linear(const pst_op& op, const Maker& maker);
OpPtr make_latent(const pst_op& op, const Maker& maker);
OpPtr make_rope(const pst_op& op, const Maker& maker);
OpPtr make_cache(const pst_op& op, const Maker& maker);
OpPtr make_choose(const pst_op& op, const Maker& maker);
OpPtr make_rehearse(const pst_op& op, const Maker& maker);
OpPtr make_route(const pst_op& op, const Maker& maker);
OpPtr make_experts(const pst_op& op, const Maker& maker);
OpPtr make_state(const pst_op& op, const Maker& maker);
OpPtr make_rwkv_rows(const pst_op& op, const Maker& maker);
OpPtr make_streams(const pst_op& op, const Maker& maker);
OpPtr make_connections(const pst_op& op, const Maker& maker);
OpPtr make_entries(const pst_op& op, const Maker& maker);
OpPtr make_attend_text(const pst_op& op, const Maker& maker);
OpPtr make_biased_heads(const pst_op& op, const Maker& maker);
OpPtr make_adapt(const pst_op& op, const Maker& maker);
OpPtr make_adapt_codes(const pst_op& op, const Maker& maker);
OpPtr make_gather(const pst_op& op, const Maker& maker);
OpPtr make_merge(const pst_op& op, const Maker& maker);
OpPtr make_passing(const pst_op& op, const Maker& maker);

// panels.cpp: throws Misfit for a matrix that no format has.
void check_matrix(const pst_matrix& matrix);

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace pst
