// Residual streams: PST_SPREAD, WEIGH_STREAMS, COLLAPSE_STREAMS, MIX_STREAMS.
#include <cmath>
#include <cstring>

#include "activation.h"
#include "pieces.h"

namespace pst {

namespace {

constexpr int MOST = 8;  // streams

struct Spread final : Op {
    View in, out;
    pst_register shape;
    int num;

    Spread(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), out(maker.reg(op.out)), shape(maker.reg(op.out)), num(op.n[0]) {
        check(num > 0 && int64_t(in.width) * num == out.width, "streams are so many copies of a row");
        check(maker.reg(op.in[0]).rows == shape.rows, "streams have the rows of what they are made of");
    }
    void run(Team& team, const Context& context) const override {
        each_piece(team, context.rows(shape), in.width, [&](int64_t row, int64_t from, int64_t to) {
            for (int s = 0; s < num; s++)
                std::memcpy(out.row(row) + int64_t(s) * in.width + from, in.row(row) + from, size_t(to - from) * 4);
        });
    }
};

float sigmoid_of(float x) {
    float lanes[LANES];
    store(lanes, activate(all(x), PST_SIGMOID));
    return lanes[0];
}

// In place: sigmoids, and a matrix made doubly stochastic. See the header.
struct Weigh final : Op {
    View in, out;
    pst_register shape;
    int num, iterations;
    float eps;
    const float *scale, *base;

    Weigh(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), out(maker.reg(op.out)), shape(maker.reg(op.out)), num(op.n[0]), iterations(op.n[1]),
          eps(op.f[0]), scale(static_cast<const float*>(op.p[0])), base(static_cast<const float*>(op.p[1])) {
        check(num > 0 && num <= MOST, "there are 1 ... 8 streams");
        check(in.width == out.width && maker.reg(op.in[0]).rows == shape.rows, "weights of streams lie in place");
        check(in.width == num || in.width == (2 + num) * num, "weights of streams are n, or (2 + n) n");
        check(iterations > 0 && scale && base, "weights of streams need scales, a base and an iteration");
    }
    void run(Team& team, const Context& context) const override {
        for (int64_t first, last; team.next(16, context.rows(shape), first, last);)
            for (int64_t r = first; r < last; r++) row(in.row(r), out.row(r));
    }
    void row(const float* x, float* to) const {
        const bool whole = in.width != num;
        for (int i = 0; i < num; i++) to[i] = sigmoid_of(x[i] * scale[0] + base[i]) + eps;
        if (!whole) return;
        for (int i = num; i < 2 * num; i++) to[i] = 2.0f * sigmoid_of(x[i] * scale[1] + base[i]);
        float mix[MOST][MOST];
        const float *from = x + 2 * num, *plus = base + 2 * num;
        for (int j = 0; j < num; j++) {
            float most = -HUGE_VALF, lanes[LANES] = {};
            for (int k = 0; k < num; k++) {
                lanes[k] = from[j * num + k] * scale[2] + plus[j * num + k];
                most = lanes[k] > most ? lanes[k] : most;
            }
            store(lanes, exp(load(lanes) - all(most)));
            float total = 0.0f;
            for (int k = 0; k < num; k++) total += lanes[k];
            for (int k = 0; k < num; k++) mix[j][k] = lanes[k] / total + eps;
        }
        for (int i = 0; i < iterations; i++) {
            if (i)
                for (int j = 0; j < num; j++) {
                    float total = 0.0f;
                    for (int k = 0; k < num; k++) total += mix[j][k];
                    for (int k = 0; k < num; k++) mix[j][k] /= total + eps;
                }
            for (int k = 0; k < num; k++) {
                float total = 0.0f;
                for (int j = 0; j < num; j++) total += mix[j][k];
                for (int j = 0; j < num; j++) mix[j][k] /= total + eps;
            }
        }
        for (int j = 0; j < num; j++)
            for (int k = 0; k < num; k++) to[2 * num + j * num + k] = mix[j][k];
    }
};

struct Collapse final : Op {
    View in, weights, out;
    pst_register shape;
    int num;

    Collapse(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), weights(maker.reg(op.in[1])), out(maker.reg(op.out)), shape(maker.reg(op.out)),
          num(op.n[0]) {
        check(num > 0 && int64_t(out.width) * num == in.width && weights.width >= num, "streams do not fit their sum");
        check(maker.reg(op.in[0]).rows == shape.rows && maker.reg(op.in[1]).rows == shape.rows,
              "streams, weights and sum have rows of one kind");
    }
    void run(Team& team, const Context& context) const override {
        each_piece(team, context.rows(shape), out.width, [&](int64_t row, int64_t from, int64_t to) {
            const float *x = in.row(row), *w = weights.row(row);
            float* y = out.row(row);
            for (int64_t i = from; i < to; i += LANES) {
                const int lanes = int(std::min<int64_t>(LANES, to - i));
                F total = part(x + i, lanes) * all(w[0]);
                for (int s = 1; s < num; s++) total = fma(part(x + int64_t(s) * out.width + i, lanes), all(w[s]), total);
                if (lanes == LANES) store(y + i, total);
                else store(y + i, total, lanes);
            }
        });
    }
    static F part(const float* p, int lanes) { return lanes == LANES ? load(p) : load(p, lanes); }
};

struct Mix final : Op {
    View x, weights, y;
    pst_register shape;
    int num;

    Mix(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), weights(maker.reg(op.in[1])), y(maker.reg(op.in[2])), shape(maker.reg(op.in[0])),
          num(op.n[0]) {
        check(op.out == op.in[0], "streams are mixed in place");
        check(num > 0 && num <= MOST && int64_t(y.width) * num == x.width && weights.width == (2 + num) * num,
              "streams do not fit what is added to them");
        check(maker.reg(op.in[1]).rows == shape.rows && maker.reg(op.in[2]).rows == shape.rows,
              "streams, weights and what is added have rows of one kind");
    }
    void run(Team& team, const Context& context) const override {
        each_piece(team, context.rows(shape), y.width, [&](int64_t row, int64_t from, int64_t to) {
            const float *add = y.row(row), *write = weights.row(row) + num, *mix = write + num;
            float* streams = x.row(row);
            for (int64_t i = from; i < to; i += LANES) {
                const int lanes = int(std::min<int64_t>(LANES, to - i));
                const F more = Collapse::part(add + i, lanes);
                F old[MOST];
                for (int j = 0; j < num; j++) old[j] = Collapse::part(streams + int64_t(j) * y.width + i, lanes);
                for (int k = 0; k < num; k++) {
                    F total = more * all(write[k]);
                    for (int j = 0; j < num; j++) total = fma(old[j], all(mix[j * num + k]), total);
                    float* to_row = streams + int64_t(k) * y.width + i;
                    if (lanes == LANES) store(to_row, total);
                    else store(to_row, total, lanes);
                }
            }
        });
    }
};

}  // namespace

OpPtr make_connections(const pst_op& op, const Maker& maker) {
    switch (op.kind) {
        case PST_SPREAD: return std::make_unique<Spread>(op, maker);
        case PST_WEIGH_STREAMS: return std::make_unique<Weigh>(op, maker);
        case PST_COLLAPSE_STREAMS: return std::make_unique<Collapse>(op, maker);
        case PST_MIX_STREAMS: return std::make_unique<Mix>(op, maker);
    }
    throw Misfit("no such operation");
}

}  // namespace pst
