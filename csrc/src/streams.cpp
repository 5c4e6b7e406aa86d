// Rows of several streams side by side, rows as large as others, and gates of which a share works: PST_STREAMS,
// PST_MATCH, PST_CUT_OFF.
#include <cmath>

#include "norm_row.h"
#include "pieces.h"

namespace pst {

namespace {

constexpr int MAX_STREAMS = 8;

// A column of all streams at a time, so that it may run in place: what is written was read before.
struct Streams final : Op {
    View x, weights, found, out;
    pst_register shape;
    int32_t n, active;
    bool corrects;
    int64_t width;

    Streams(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), weights(maker.reg(op.in[op.n[1] == 1 ? 2 : 1])), found(maker.reg(op.in[1])),
          out(maker.reg(op.out)), shape(maker.reg(op.out)), n(op.n[0]), active(op.n[2]), corrects(op.n[1] == 1) {
        check(n >= 1 && n <= MAX_STREAMS, "there are one to eight streams");
        check(op.n[1] == 0 || op.n[1] == 1, "streams are mixed (0) or corrected (1)");
        check(active >= 0 && active < n, "the active one is one of the streams");
        check(x.width == out.width && out.width % n == 0, "streams are equally wide and fill their registers");
        width = out.width / n;
        check(weights.width == (corrects ? n : n * n), "every stream has its weights");
        check(!corrects || found.width == width, "what corrects streams is as wide as one of them");
        for (int i = 0; i < (corrects ? 3 : 2); i++)
            check(maker.reg(op.in[i]).rows == shape.rows, "registers of streams have the same rows");
    }
    void run(Team& team, const Context& context) const override {
        each_piece(team, context.rows(shape), width, [&](int64_t row, int64_t from, int64_t to) {
            corrects ? correct(row, from, to) : mix(row, from, to);
        });
    }
    void mix(int64_t row, int64_t from, int64_t to) const {
        const float *in = x.row(row), *w = weights.row(row);
        float* to_row = out.row(row);
        for (int64_t at = from; at < to; at += LANES) {
            int lanes = int(std::min<int64_t>(LANES, to - at));
            F was[MAX_STREAMS];
            for (int j = 0; j < n; j++) was[j] = load_part(in + j * width + at, lanes);
            for (int i = 0; i < n; i++) {
                F sum = was[i];
                for (int j = 0; j < n; j++) sum = fma(all(w[i * n + j]), was[j], sum);
                store_part(to_row + i * width + at, sum, lanes);
            }
        }
    }
    void correct(int64_t row, int64_t from, int64_t to) const {
        const float *in = x.row(row), *by = found.row(row), *w = weights.row(row);
        float* to_row = out.row(row);
        for (int64_t at = from; at < to; at += LANES) {
            int lanes = int(std::min<int64_t>(LANES, to - at));
            F news = load_part(by + at, lanes) - load_part(in + active * width + at, lanes);
            for (int i = 0; i < n; i++) {
                F was = load_part(in + i * width + at, lanes);
                store_part(to_row + i * width + at, fma(all(1.0f + w[i]), news, was), lanes);
            }
        }
    }
};

inline float mean_square(const float* x, int n) {
    RowSum squares;
    each_vector(n, [&](int i, int lanes) { squares.add_square(load_part(x + i, lanes)); });
    return squares.value() / float(n);
}

// Rows by themselves: each has a sum over all of it.
struct ByRow : Op {
    View in, out;
    pst_register shape;
    int n;

    ByRow(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), out(maker.reg(op.out)), shape(maker.reg(op.out)), n(out.width) {
        same(maker.reg(op.in[0]));
    }
    void same(const pst_register& r) const {
        check(r.width == shape.width && r.rows == shape.rows, "registers are equally wide and have the same rows");
    }
    virtual void one(int64_t row) const = 0;
    void run(Team& team, const Context& context) const override {
        int64_t grain = std::max<int64_t>(1, PIECE / n);
        for (int64_t i, end; team.next(grain, context.rows(shape), i, end);)
            for (; i < end; i++) one(i);
    }
};

struct CutOff final : ByRow {
    float factor;

    CutOff(const pst_op& op, const Maker& maker) : ByRow(op, maker), factor(op.f[0]) {}
    void one(int64_t row) const override {
        const float* x = in.row(row);
        float* y = out.row(row);
        RowSum total;
        each_vector(n, [&](int i, int lanes) { total.add(load_part(x + i, lanes)); });
        F mean = all(total.value() / float(n));
        // Out first, and squares from there: lanes behind the end are zero again.
        each_vector(n, [&](int i, int lanes) { store_part(y + i, load_part(x + i, lanes) - mean, lanes); });
        F least = all(std::sqrt(mean_square(y, n)) * factor);
        // The zero on the left: `max` gives its right side if one is NaN, and a NaN must stay to be seen.
        each_vector(n, [&](int i, int lanes) {
            store_part(y + i, max(all(0.0f), load_part(y + i, lanes) - least), lanes);
        });
    }
};

struct Match final : ByRow {
    View like;
    float least;

    Match(const pst_op& op, const Maker& maker) : ByRow(op, maker), like(maker.reg(op.in[1])), least(op.f[0]) {
        same(maker.reg(op.in[1]));
        check(least > 0, "the least mean square is larger than 0");
    }
    void one(int64_t row) const override {
        float found = mean_square(in.row(row), n);
        if (found < least) found = least;  // a NaN stays one
        F by = all(std::sqrt(mean_square(like.row(row), n)) / std::sqrt(found));
        map(in.row(row), out.row(row), n, [by](F x) { return x * by; });
    }
};

}  // namespace

OpPtr make_streams(const pst_op& op, const Maker& maker) {
    switch (op.kind) {
        case PST_STREAMS: return std::make_unique<Streams>(op, maker);
        case PST_CUT_OFF: return std::make_unique<CutOff>(op, maker);
        default: return std::make_unique<Match>(op, maker);
    }
}

}  // namespace pst
