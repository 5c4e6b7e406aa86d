// Heads whose state is a matrix S [keys][width], advanced for one token at a time and for a strip of its columns.
//
// All rules are S[k] = fade[k] S[k] + write[k] value (- erase[k] found), out = sum of read[k] S[k], with BEFORE of what S
// was, where `found` is the sum of find[k] S[k] before. Sums run over k in order. While a token's S is made, what the next one will find in it is
// summed up too, so that S passes through the registers once per token.
#pragma once

#include "state.h"

namespace pst {

constexpr int STRIP = 64, BATCH = 16;

// What a rule makes of one token of one head: [keys] each, in registers of the model or in scratch.
struct Row {
    const float *fade, *write, *erase, *read, *find;
    float* own;     // room for 4 x keys, each row of a padded width
    float scale;    // the rule's own
    int fade_step;  // 0: one number for all keys
};

template <int V, bool FINDS, bool ERASES, bool BEFORE>
void pass(float* s, int64_t stride, int keys, const Row& row, const F* value, const F* lost, const float* find, F* out,
          F* found) {
    F y[V], z[V], add[V], gone[V];
    for (int v = 0; v < V; v++) {
        y[v] = z[v] = all(0.0f);
        add[v] = value[v];
        if (ERASES) gone[v] = lost[v];
    }
    for (int k = 0; k < keys; k++, s += stride) {
        F fade = all(row.fade[k * row.fade_step]), write = all(row.write[k]), read = all(row.read[k]), erase, next;
        if (ERASES) erase = all(row.erase[k]);
        if (FINDS) next = all(find[k]);
        for (int v = 0; v < V; v++) {
            F old = load(s + v * LANES), x = fma(write, add[v], old * fade);
            if (ERASES) x = fma(erase, gone[v], x);
            store(s + v * LANES, x);
            y[v] = fma(read, BEFORE ? old : x, y[v]);
            if (FINDS) z[v] = fma(next, x, z[v]);
        }
    }
    for (int v = 0; v < V; v++) {
        out[v] = y[v];
        if (FINDS) found[v] = z[v];
    }
}

template <int V>
void seek(const float* s, int64_t stride, int keys, const float* find, F* found) {
    F z[V];
    for (F& x : z) x = all(0.0f);
    for (int k = 0; k < keys; k++, s += stride)
        for (int v = 0; v < V; v++) z[v] = fma(all(find[k]), load(s + v * LANES), z[v]);
    for (int v = 0; v < V; v++) found[v] = z[v];
}

inline F part(const float* p, int lanes) { return lanes == LANES ? load(p) : load(p, lanes); }
inline void put(float* p, F x, int lanes) {
    if (lanes == LANES) store(p, x);
    else store(p, x, lanes);
}

// A Rule has: FINDS, ERASES, BEFORE; in, out; `heads`, `keys`, `width`, `sharing`;
//   batch(t, count, head, numbers)   of up to 16 tokens at once: two numbers of each, [2][16]
//   row(t, head, numbers, Row&)      everything but `value`; numbers: those of this token
//   value(row, in, found), result(row, head, in, out)   of lanes of the head's input
template <class Rule>
struct Heads final : Op {
    Rule rule;
    Slots slots;
    int64_t strips;

    Heads(const pst_op& op, const Maker& maker)
        : rule(op, maker), slots(op, maker, op.n[2], int64_t(rule.heads) * rule.keys * rule.width),
          strips((rule.width + STRIP - 1) / STRIP) {
        check_tokens(maker.reg(op.out), int64_t(rule.heads) * rule.width);
        own_bytes = int64_t(sizeof(float)) * (int64_t(rule.keys) * STRIP + 2 * row_floats());
        keeps_state = true;
    }
    int64_t row_floats() const { return 4 * (rule.keys + LANES - 1) / LANES * LANES + 4 * LANES; }

    void run(Team& team, const Context& context) const override {
        each_part(team, context.step, rule.heads * strips, [&](int sequence, const Run& run, int number) {
            int head = int(number / strips), from = int(number % strips) * STRIP;
            int count = std::min(STRIP, rule.width - from);
            float* kept = slots.of(context.step, sequence) + int64_t(head) * rule.keys * rule.width + from;
            auto* scratch = reinterpret_cast<float*>(context.own_scratch);
            switch ((count + LANES - 1) / LANES) {
                case 1: return strip<1>(run, head, from, count, kept, scratch);
                case 2: return strip<2>(run, head, from, count, kept, scratch);
                case 3: return strip<3>(run, head, from, count, kept, scratch);
                default: return strip<4>(run, head, from, count, kept, scratch);
            }
        });
    }

    template <int V>
    void strip(const Run& run, int head, int from, int count, float* kept, float* scratch) const {
        // Few tokens work on the page itself. More would find its rows in few sets of the cache.
        bool direct = count == V * LANES && (run.count() < 4 || rule.width == V * LANES);
        float* state = direct ? kept : scratch;
        int64_t stride = direct ? rule.width : V * LANES;
        for (int k = 0; k < rule.keys && (run.fresh || !direct); k++)
            for (int i = 0; i < count; i += LANES)
                store(state + k * stride + i, run.fresh ? all(0.0f) : part(kept + int64_t(k) * rule.width + i,
                                                                          std::min(LANES, count - i)));
        advance<V>(run, head, from, count, state, stride, scratch + int64_t(rule.keys) * STRIP);
        for (int k = 0; k < rule.keys && !direct; k++)
            for (int i = 0; i < count; i += LANES)
                put(kept + int64_t(k) * rule.width + i, load(state + k * stride + i), std::min(LANES, count - i));
    }

    template <int V>
    void advance(const Run& run, int head, int from, int count, float* state, int64_t stride, float* own) const {
        alignas(64) float numbers[2][BATCH];
        Row rows[2];
        rows[0].own = own, rows[1].own = own + row_floats();
        F found[V], value[V], out[V], lost[V];
        auto ready = [&](int64_t t) {
            int64_t i = (t - run.first) % BATCH;
            if (i == 0) rule.batch(t, int(std::min<int64_t>(BATCH, run.last - t)), head, numbers);
            Row& row = rows[t & 1];
            rule.row(t, head, numbers[0] + i, row);
            return &row;
        };
        const Row* row = ready(run.first);
        for (F& x : found) x = all(0.0f);
        if (Rule::FINDS) seek<V>(state, stride, rule.keys, row->find, found);
        for (int64_t t = run.first; t < run.last; t++) {
            const float* in = rule.in.row(t) + int64_t(head / rule.sharing) * rule.width + from;
            for (int v = 0; v < V; v++) {
                value[v] = rule.value(*row, part(in + v * LANES, std::min(LANES, count - v * LANES)), found[v]);
                lost[v] = found[v];
            }
            const bool more = t + 1 < run.last;
            const Row* next = row;
            // The next token's numbers overwrite those of its batch: this row's `fade` may be one of them.
            Row current = *row;
            float fade = row->fade_step ? 0.0f : *row->fade;
            if (!row->fade_step) current.fade = &fade;
            if (more) next = ready(t + 1);
            if (Rule::FINDS && more)
                pass<V, true, Rule::ERASES, Rule::BEFORE>(state, stride, rule.keys, current, value, lost, next->find, out, found);
            else
                pass<V, false, Rule::ERASES, Rule::BEFORE>(state, stride, rule.keys, current, value, lost, nullptr, out, found);
            float* to = rule.out.row(t) + int64_t(head) * rule.width + from;
            for (int v = 0; v < V; v++) {
                int lanes = std::min(LANES, count - v * LANES);
                put(to + v * LANES, rule.result(current, head, part(in + v * LANES, lanes), out[v]), lanes);
            }
            row = next;
        }
    }
};

}  // namespace pst
