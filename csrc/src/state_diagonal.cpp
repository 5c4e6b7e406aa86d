// Channels with a diagonal rule: PST_RG_LRU, whose numbers fade as the token says, and PST_DIAGONAL, whose are complex.
#include <cmath>

#include "activation.h"
#include "state_strips.h"

namespace pst {

namespace {

struct RgLru final : Op {
    View x, gate, fade, out;
    Slots slots;
    const float *a, *gate_bias, *fade_bias;

    RgLru(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), gate(maker.reg(op.in[1])), fade(maker.reg(op.in[2])), out(maker.reg(op.out)),
          slots(op, maker, op.n[2], out.width), a(static_cast<const float*>(op.p[0])),
          gate_bias(static_cast<const float*>(op.p[1])), fade_bias(static_cast<const float*>(op.p[2])) {
        for (int i : {0, 1, 2}) check_tokens(maker.reg(op.in[i]), out.width);
        check_tokens(maker.reg(op.out), out.width);
        check(a && gate_bias && fade_bias, "an RG-LRU has a, and biases of its two gates");
        keeps_state = true;
    }
    void run(Team& team, const Context& context) const override {
        each_part(team, context.step, (out.width + STRIP - 1) / STRIP, [&](int sequence, const Run& run, int strip) {
            int from = strip * STRIP, count = std::min(STRIP, out.width - from);
            float* kept = slots.of(context.step, sequence) + from;
            F state[VECTORS];
            for (int i = 0; i < count; i += LANES)
                state[i / LANES] = run.fresh ? all(0.0f) : part(kept + i, std::min(LANES, count - i));
            for (int64_t t = run.first; t < run.last; t++)
                for (int i = 0; i < count; i += LANES)
                    advance(t, from + i, std::min(LANES, count - i), run.fresh && t == run.first, state[i / LANES]);
            for (int i = 0; i < count; i += LANES) put(kept + i, state[i / LANES], std::min(LANES, count - i));
        });
    }
    void advance(int64_t t, int at, int lanes, bool first, F& s) const {
        F given = part(x.row(t) + at, lanes) * sigmoid(part(gate.row(t) + at, lanes) + part(gate_bias + at, lanes));
        F slow = part(a + at, lanes) * sigmoid(part(fade.row(t) + at, lanes) + part(fade_bias + at, lanes));
        // 1 - e^(2 slow), where a difference would have few digits left.
        F half = tanh(slow), rest = (half + half) / (half - all(1.0f));
        s = fma(exp(slow), s, given * (first ? all(1.0f) : root(rest)));
        put(out.row(t) + at, s, lanes);
    }
    static F root(F x) {
        alignas(64) float lanes[LANES];
        store(lanes, x);
        for (float& lane : lanes) lane = std::sqrt(lane);
        return load(lanes);
    }
};

struct Diagonal final : Op {
    View x, out;
    bool pairs;
    int width, states;
    Slots re, im;
    std::vector<float> numbers;  // [strip][state][4][STRIP]: a and c, real and imaginary parts
    const float* skip;

    Diagonal(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), out(maker.reg(op.out)), pairs(op.n[5] != 0), width(pairs ? out.width / 2 : out.width),
          states(op.n[4]), re(op, maker, op.n[2], int64_t(states) * width),
          im(op, maker, op.n[3], int64_t(states) * width), skip(static_cast<const float*>(op.p[2])) {
        check(states > 0 && (!pairs || out.width % 2 == 0), "a diagonal has states, and complex rows have two parts");
        check_tokens(maker.reg(op.in[0]), out.width);
        check_tokens(maker.reg(op.out), out.width);
        const float* fixed[] = {static_cast<const float*>(op.p[0]), static_cast<const float*>(op.p[1])};
        check(fixed[0] && fixed[1] && (pairs || skip), "a diagonal has a, c and, of real rows, d");
        numbers.resize(size_t(int64_t((width + STRIP - 1) / STRIP) * states * 4 * STRIP));
        for (int i = 0; i < width; i++)
            for (int n = 0; n < states; n++)
                for (int p = 0; p < 4; p++)
                    numbers[size_t((((int64_t(i / STRIP) * states + n) * 4) + p) * STRIP + i % STRIP)] =
                        fixed[p / 2][(int64_t(p % 2) * width + i) * states + n];
        own_bytes = int64_t(2) * states * STRIP * int64_t(sizeof(float));
        keeps_state = true;
    }
    void run(Team& team, const Context& context) const override {
        float *real = reinterpret_cast<float*>(context.own_scratch), *imaginary = real + int64_t(states) * STRIP;
        each_part(team, context.step, (width + STRIP - 1) / STRIP, [&](int sequence, const Run& run, int strip) {
            int from = strip * STRIP, count = std::min(STRIP, width - from);
            float *of_re = re.of(context.step, sequence) + from, *of_im = im.of(context.step, sequence) + from;
            take(of_re, width, states, count, run.fresh, real);
            take(of_im, width, states, count, run.fresh, imaginary);
            for (int64_t t = run.first; t < run.last; t++) advance(t, strip, count, real, imaginary);
            bring_back(real, states, count, of_re, width);
            bring_back(imaginary, states, count, of_im, width);
        });
    }
    void advance(int64_t t, int strip, int count, float* real, float* imaginary) const {
        const float *from = x.row(t) + int64_t(strip) * STRIP, *own = numbers.data() + int64_t(strip) * states * 4 * STRIP;
        float* to = out.row(t) + int64_t(strip) * STRIP;
        for (int i = 0; i < count; i += LANES) {
            int lanes = std::min(LANES, count - i);
            F in = part(from + i, lanes), in2 = pairs ? part(from + width + i, lanes) : all(0.0f);
            F y = pairs ? all(0.0f) : in * part(skip + int64_t(strip) * STRIP + i, lanes), y2 = all(0.0f);
            for (int n = 0; n < states; n++) {
                const float* p = own + n * 4 * STRIP + i;
                float *r = real + n * STRIP + i, *m = imaginary + n * STRIP + i;
                F a = load(p), a2 = load(p + STRIP), c = load(p + 2 * STRIP), c2 = load(p + 3 * STRIP);
                F s = load(r), s2 = load(m), none = all(0.0f);
                F next = fma(a, s, fma(none - a2, s2, in)), next2 = fma(a, s2, fma(a2, s, in2));
                store(r, next);
                store(m, next2);
                y = fma(c, next, fma(none - c2, next2, y));
                if (pairs) y2 = fma(c, next2, fma(c2, next, y2));
            }
            put(to + i, y, lanes);
            if (pairs) put(to + width + i, y2, lanes);
        }
    }
};

}  // namespace

OpPtr make_diagonal(const pst_op& op, const Maker& maker) {
    if (op.kind == PST_RG_LRU) return std::make_unique<RgLru>(op, maker);
    return std::make_unique<Diagonal>(op, maker);
}

}  // namespace pst
