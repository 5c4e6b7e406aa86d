// States of channels that know nothing of each other: PST_SCAN (Mamba's), PST_WKV4.
#include <limits>

#include "activation.h"
#include "state_strips.h"

namespace pst {

namespace {

struct Scan final : Op {
    View x, dt, b, c, out;
    Slots slots;
    int states;
    std::vector<float> decay;  // [strip][state][STRIP]
    const float* skip;

    Scan(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), dt(maker.reg(op.in[1])), b(maker.reg(op.in[2])), c(maker.reg(op.in[3])),
          out(maker.reg(op.out)), slots(op, maker, op.n[2], int64_t(b.width) * out.width), states(b.width),
          skip(static_cast<const float*>(op.p[1])) {
        for (int i : {0, 1}) check_tokens(maker.reg(op.in[i]), out.width);
        for (int i : {2, 3}) check_tokens(maker.reg(op.in[i]), states);
        check_tokens(maker.reg(op.out), out.width);
        const auto* a = static_cast<const float*>(op.p[0]);
        check(a && skip, "a scan has a and d");
        decay.resize(size_t(round_up(out.width, STRIP) * states));
        for (int i = 0; i < out.width; i++)
            for (int n = 0; n < states; n++)
                decay[size_t((int64_t(i / STRIP) * states + n) * STRIP + i % STRIP)] = a[int64_t(i) * states + n];
        own_bytes = int64_t(states) * STRIP * int64_t(sizeof(float));
        keeps_state = true;
    }
    static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

    void run(Team& team, const Context& context) const override {
        auto* state = reinterpret_cast<float*>(context.own_scratch);
        each_part(team, context.step, round_up(out.width, STRIP) / STRIP, [&](int sequence, const Run& run, int strip) {
            int from = strip * STRIP, count = std::min(STRIP, out.width - from);
            float* kept = slots.of(context.step, sequence) + from;
            take(kept, out.width, states, count, run.fresh, state);
            for (int64_t t = run.first; t < run.last; t++) advance(t, strip, count, state);
            bring_back(state, states, count, kept, out.width);
        });
    }
    void advance(int64_t t, int strip, int count, float* state) const {
        int from = strip * STRIP;
        const float *a = decay.data() + int64_t(strip) * states * STRIP, *write = b.row(t), *read = c.row(t);
        for (int i = 0; i < count; i += LANES) {
            int lanes = std::min(LANES, count - i);
            F in = part(x.row(t) + from + i, lanes), step = softplus(part(dt.row(t) + from + i, lanes)), given = step * in;
            F y = in * part(skip + from + i, lanes);
            for (int n = 0; n < states; n++) {
                float* own = state + n * STRIP + i;
                F s = fma(load(own), exp(step * load(a + n * STRIP + i)), given * all(write[n]));
                store(own, s);
                y = fma(s, all(read[n]), y);
            }
            put(out.row(t) + from + i, y, lanes);
        }
    }
};

struct Wkv4 final : Op {
    View k, v, out;
    Slots num, den, top;
    const float *decay, *first;

    Wkv4(const pst_op& op, const Maker& maker)
        : k(maker.reg(op.in[0])), v(maker.reg(op.in[1])), out(maker.reg(op.out)), num(op, maker, op.n[2], out.width),
          den(op, maker, op.n[3], out.width), top(op, maker, op.n[4], out.width),
          decay(static_cast<const float*>(op.p[0])), first(static_cast<const float*>(op.p[1])) {
        for (int i : {0, 1}) check_tokens(maker.reg(op.in[i]), out.width);
        check_tokens(maker.reg(op.out), out.width);
        check(decay && first, "RWKV-4 has a decay and a bonus");
        keeps_state = true;
    }
    void run(Team& team, const Context& context) const override {
        each_part(team, context.step, (out.width + STRIP - 1) / STRIP, [&](int sequence, const Run& run, int strip) {
            int from = strip * STRIP, count = std::min(STRIP, out.width - from);
            float* kept[3];
            const Slots* planes[] = {&num, &den, &top};
            F state[VECTORS][3];
            for (int p = 0; p < 3; p++) {
                kept[p] = planes[p]->of(context.step, sequence) + from;
                F zero = all(p == 2 ? -std::numeric_limits<float>::infinity() : 0.0f);
                for (int i = 0; i < count; i += LANES)
                    state[i / LANES][p] = run.fresh ? zero : part(kept[p] + i, std::min(LANES, count - i));
            }
            for (int64_t t = run.first; t < run.last; t++)
                for (int i = 0; i < count; i += LANES) advance(t, from + i, std::min(LANES, count - i), state[i / LANES]);
            for (int p = 0; p < 3; p++)
                for (int i = 0; i < count; i += LANES) put(kept[p] + i, state[i / LANES][p], std::min(LANES, count - i));
        });
    }
    // Larger on the left: of a NaN and a number, `max` gives its right side, and a NaN has to stay.
    void advance(int64_t t, int at, int lanes, F* s) const {
        F key = part(k.row(t) + at, lanes), value = part(v.row(t) + at, lanes);
        F bonus = key + part(first + at, lanes), most = max(s[2], bonus);
        F old = exp(s[2] - most), fresh = exp(bonus - most);
        put(out.row(t) + at, fma(s[0], old, value * fresh) / fma(s[1], old, fresh), lanes);
        F faded = s[2] + part(decay + at, lanes);
        most = max(faded, key);
        old = exp(faded - most), fresh = exp(key - most);
        s[0] = fma(s[0], old, value * fresh);
        s[1] = fma(s[1], old, fresh);
        s[2] = most;
    }
};

}  // namespace

OpPtr make_channels(const pst_op& op, const Maker& maker) {
    if (op.kind == PST_SCAN) return std::make_unique<Scan>(op, maker);
    return std::make_unique<Wkv4>(op, maker);
}

}  // namespace pst
