// PST_MLSTM_GATES: of the mLSTM what is not linear, and what all columns of a head's matrix share.
#include <cmath>

#include "activation.h"
#include "norm_row.h"
#include "state.h"

namespace pst {

namespace {

struct MlstmGates final : Op {
    View in, fade, q, k, out;
    int heads, keys;
    Slots sums, tops;
    float eps, scale;

    MlstmGates(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), fade(maker.reg(op.in[1])), q(maker.reg(op.in[2])), k(maker.reg(op.in[3])),
          out(maker.reg(op.out)), heads(op.n[4]), keys(op.n[5]),
          sums(op, maker, op.n[2], int64_t(heads) * keys), tops(op, maker, op.n[3], heads), eps(op.f[0]) {
        check(heads > 0 && keys > 0, "an mLSTM has heads and keys");
        scale = 1.0f / std::sqrt(float(keys));
        for (int i : {0, 1}) check_tokens(maker.reg(op.in[i]), heads);
        for (int i : {2, 3}) check_tokens(maker.reg(op.in[i]), int64_t(heads) * keys);
        check_tokens(maker.reg(op.out), int64_t(3) * heads);
        keeps_state = true;
    }
    void run(Team& team, const Context& context) const override {
        each_part(team, context.step, heads, [&](int sequence, const Run& run, int head) {
            float* sum_of = sums.of(context.step, sequence) + int64_t(head) * keys;
            float* top = tops.of(context.step, sequence) + head;
            if (run.fresh) {
                *top = 0.0f;
                std::fill(sum_of, sum_of + keys, 0.0f);
            }
            for (int64_t t = run.first; t < run.last; t++) *top = advance(t, head, *top, sum_of);
        });
    }
    // Of one number: the lanes hold the same.
    static float first(F x) {
        alignas(64) float lanes[LANES];
        store(lanes, x);
        return lanes[0];
    }
    // `exp` does not promise to keep a NaN; what is cut keeps one, and its difference from itself is 0 for other numbers.
    static F power(F x) {
        F c = cut(x, -100.0f, 88.0f);
        return exp(c) + (c - c);
    }
    float advance(int64_t t, int head, float top, float* sum_of) const {
        F gate = all(in.row(t)[head]), slow = all(0.0f) - softplus(all(0.0f) - all(fade.row(t)[head])) + all(top);
        F most = max(slow, gate);  // of a NaN and a number its right side: what follows shows the other
        F by = power(slow - most), fresh = power(gate - most), total = all(0.0f);
        const float *key = k.row(t) + int64_t(head) * keys, *query = q.row(t) + int64_t(head) * keys;
        each_vector(keys, [&](int i, int lanes) {
            F s = fma(by, load_part(sum_of + i, lanes), fresh * load_part(key + i, lanes));
            store_part(sum_of + i, s, lanes);
            total = fma(load_part(query + i, lanes), s, total);
        });
        F found = abs(all(sum(total) * scale)), least = power(all(0.0f) - most);
        float* to = out.row(t);
        to[head] = first(by), to[heads + head] = first(fresh);
        to[2 * heads + head] = first(all(scale) / (max(least, found) + all(eps)));
        return first(most);
    }
};

}  // namespace

OpPtr make_mlstm_gates(const pst_op& op, const Maker& maker) { return std::make_unique<MlstmGates>(op, maker); }

}  // namespace pst
