// The operation PST_ATTEND: its parts, in attention.cpp, attention_plan.cpp and attention_shared.cpp.
#pragma once

#include "attention.h"
#include "pages.h"

#include <algorithm>

namespace pst {

struct Attend final : Op {
    pst_register queries, out;
    Rule rule;
    PageChoice choice;
    pst_register slots_of;  // what PST_CHOOSE found, of width `most`, if any; or, if `rehearsed`, bits
    bool rehearsed = false;
    int most = 0;
    int group, heads, dim;
    int kv_heads, per;  // of the query heads `per` and `per` read a kv head; where there are many, `parts` times the same
    int parts = 1;
    Lines lines;
    const float *slopes, *sinks;
    int ranks = 1, rank = 0;  // of the tokens those at positions p with p % ranks == rank are here; -1 ranks: see pst_group.held
    bool partial = false;     // parts of heads come out: see PST_ATTEND_PART
    int block_tokens, block_rows, max_blocks;
    int64_t query_bytes, state_bytes, plan_bytes, pairs_max, slots, choice_at, lasts_at;
    int max_tokens = 0;

    // ---- a thread's memory ----

    struct Own {
        Block* blocks;
        int32_t* splits;   // numbers of split blocks
        int32_t* members;  // numbers of blocks in bundles, and where each bundle ends among them
        int32_t* ends;
        uint8_t *keys, *more, *values, *queries, *part, *whole;
        float *factors, *more_factors, *value_scales, *scratch, *turned;
        const uint8_t** rows;  // of `turned`
        uint8_t* choice;
        int32_t *lasts, *firsts;  // [T] of tokens that are shared out: see Block
        int64_t* keys_read;

        Own behind(int64_t query_bytes) const {
            Own own = *this;
            own.queries += query_bytes;
            return own;
        }
    };

    // Rows whose scores of a chunk exist at once.
    int most_rows() const { return rule.more.dim ? STRIP_ROWS : shares_group >= 0 ? block_rows : ROW_GROUP; }
    void lay_out(const Maker& maker);
    Own own_memory(const Context& context) const;

    // ---- planning: every thread by itself, all with the same result ----

    struct Plan {
        int blocks = 0, splits = 0, spans = 0;  // spans of the longest split block
        int together = 1;                       // kv heads of a task, a divisor of all
        int bundles = 0;
    };
    Plan plan(const pst_step& step, const Prefixes& prefixes, int threads, const Own& own) const;
    // What each token of the step sees of the tokens that are here.
    void share_out(const pst_step& step, const Own& own) const;
    // Bundles of blocks that are all of their sequence in this step, and mostly shared: as many as have a chunk in common and
    // rows enough, but so few that every thread has a task.
    int bundle(const Prefixes& prefixes, int blocks, int threads, const Own& own) const;
    // Where tokens are forgotten, the others move up: a window may lie across one span more, and a chunk begin earlier
    // by as much as its length.
    int most_spans(const Block& block, bool forgets) const;
    // Tokens that the line of a layer without lines of its own still has for token t.
    int seen(const pst_step& step, int b, int t) const;
    // Whether PST_REHEARSE chose for a block's one token.
    bool chose(const Block& block) const;
    // Keys that a block reads which picks them.
    int64_t read(const pst_step& step, const Block& block) const;
    // kv heads of a task in a step with so many spans in all blocks, the largest block with `tokens` of them.
    int heads_together(int64_t spans, int tokens, int threads) const;

    // ---- a block, some kv heads, a span ----

    // kv heads first ... first + count - 1. Their rows follow each other, head by head, in queries and states.
    struct Heads {
        int first, count;
    };
    int in_page(int head) const { return lines.in_page(head / parts); }

    // The block as the line of these heads has it.
    Block kept(const Context& context, const Block& block, Heads some) const {
        return block.behind(rule, dropped(context.step.groups[group], block.sequence, lines.of(some.first)));
    }

    Pages pages_of(const Context& context, const Block& block, Heads some) const {
        return Pages(context.step.groups[group], block.sequence, lines.of(some.first));
    }

    // The first of a block's queries: of all tokens, or of those that are wanted.
    const float* query_row(const Block& block) const {
        return queries.data + (queries.rows == PST_ROWS_TOKENS ? block.first : block.row) * queries.stride;
    }
    void take_queries(const Block& block, Heads some, const Own& own) const;

    Reach reach(const Block& block, int row, int head, int start) const {
        const int token = row / per, position = block.at(token);
        Reach out;
        out.first = std::max(block.first_key(rule, token) - start, 0);
        out.last = std::min(position + 1 - start, CHUNK);
        out.slope = slopes ? slopes[head * per + row % per] : 0.0f;
        out.distance = float(partial ? block.positions[token] - rank - ranks * start : position - start);
        return out;
    }
    // The states of the block's rows after the keys of one span alone. `fresh`: nobody has fetched its first ones.
    // `on`: the next span is the next that this thread attends.
    void attend_span(const Pages& pages, const Block& block, Heads some, int span, bool fresh, bool on,
                     const Own& own, const State& state) const;
    // The same from the chunk at `begin` on, onto what is in `state`.
    void attend_chunks(const Pages& pages, const Block& block, Heads some, int begin, int span, bool fresh,
                       bool on, const Own& own, const State& state) const;
    // Rows that some heads read of the next chunk. Values of a second plane's keys are those of the first.
    Ahead ahead_of(const Places& next, const Block& block, Heads some) const;
    // Of a chunk for few rows only what strips need: those run from own.keys into own.values.
    Strips gather(int start, const Places& places, bool few, bool fresh, const Own& own, Ahead& ahead) const;
    // Whether all rows of a task are so few that none of its chunks is made ready as a whole, and see of this one something.
    bool all_in_strips(const Places& places, const Block& block, Heads some) const;
    void attend_strips(const Block& block, Heads some, int start, const Strips& strips, const Own& own,
                       const State& state, Ahead& ahead) const;

    // A kv head and the chunk at `start`, with the block's queries of this head and their states.
    struct Part {
        int head, start;
        const uint8_t* queries;
        State state;
    };
    // Tokens t0 ... t1-1, all of which see something of the chunk.
    void attend_tokens(const Block& block, const Part& part, int t0, int t1, const Strips& strips, const Own& own,
                       Ahead& ahead) const;
    void attend_tree(const Pages& pages, const Block& block, const Part& part, Places& places, const Own& own,
                     Ahead& ahead) const;
    void fold(const Block& block, Heads some, int span, const State& whole, const State& part) const;
    void put_out(const Block& block, Heads some, const State& whole) const;
    // The part of a row's head, of a state or of nothing.
    void put_part(const State* whole, int row, float* to) const;
    void put_nothing(const Block& block, Heads some) const;

    State state_at(uint8_t* memory) const { return State(memory, block_rows, rule.values.padded); }
    void attend_alone(const Pages& pages, const Block& block, Heads some, const Own& own) const;

    // ---- sequences that begin with the same keys ----

    struct Bundle {
        const Context& context;
        const Own& own;
        const int32_t* members;
        int count;
        Heads head;
        State part;
        Places *now, *next;  // of a chunk and, where `member` has it in common with the one behind it, that at `found`
        Reach* reaches;      // of each row in a chunk that all see
        int member = -1, found = -1;

        int row(int member) const {  // the first of a member's
            int rows = 0;
            for (int i = 0; i < member; i++) rows += block(i).count;
            return rows;
        }
        const Block& block(int member) const { return own.blocks[members[member]]; }
    };
    void attend_bundle(const Context& context, const int32_t* members, int count, int head, const Own& own) const;
    // Members first ... last-1, which have all before `start` in common, in a span from there on: as long as they have the
    // chunk in common together, then those that still do.
    void attend_members(Bundle& bundle, int first, int last, int start, int span) const;
    // What a member has of the chunk at `start`, before it is its turn: alone it reads too little for anybody to see it coming.
    void fetch(const Bundle& bundle, const Block& block, int start) const;
    void attend_shared(Bundle& bundle, int first, int last, int start, bool fresh) const;
    // One token, which reads those in the slots that were found for it: as if its sequence had no others.
    void attend_slots(const Context& context, const Block& block, Heads some, const Own& own) const;
    // One token, which reads of each kv head the tokens that were chosen: as if its sequence had no others.
    void attend_rehearsed(const Context& context, const Block& block, Heads some, const Own& own) const;
    // One token, which reads of each kv head the pages that it chooses: as if its sequence had no others.
    void attend_chosen(const Context& context, const Block& block, Heads some, const Own& own) const;

    // ---- long tasks, by all threads ----

    // Shared scratch is the states of the split tasks, then those of a wave's spans.
    void attend_split(Team& team, const Context& context, const Plan& plan, const Own& own) const;
    void run(Team& team, const Context& context) const override;
};

}  // namespace pst
