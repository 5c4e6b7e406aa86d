// What RWKV does to the numbers of a row: PST_LERP, REMOVAL_KEY, REPLACEMENT_KEY, VALUE_BONUS; PST_BIASED_HEADS.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "activation.h"
#include "norm_row.h"
#include "pieces.h"

namespace pst {

namespace {

struct Three {
    const pst_op& op;
    const Maker& maker;
    const pst_register& out;

    Three(const pst_op& op, const Maker& maker) : op(op), maker(maker), out(maker.reg(op.out)) {}
    View in(int number) const {
        const pst_register& r = maker.reg(op.in[number]);
        check(r.width == out.width && r.rows == out.rows, "registers are equally wide and have the same rows");
        return View(r);
    }
    const float* weight() const {
        check(op.p[0] != nullptr, "it has weights");
        return static_cast<const float*>(op.p[0]);
    }
};

// out = each(x, y, w) by columns; w is a row of the register `z`, or the same for all rows.
template <class Each>
struct Mixed final : Op {
    View x, y, z, out;
    pst_register shape;
    const float* weight;
    Each each;

    Mixed(const Three& of, Each each)
        : x(of.in(0)), y(of.in(1)), z(of.op.p[0] ? of.in(0) : of.in(2)), out(of.out), shape(of.out),
          weight(static_cast<const float*>(of.op.p[0])), each(each) {}
    void run(Team& team, const Context& context) const override {
        Each own = each;
        each_piece(team, context.rows(shape), out.width, [&](int64_t row, int64_t from, int64_t to) {
            const float *a = x.row(row), *b = y.row(row), *w = weight ? weight : z.row(row);
            for (int64_t i = from; i < to; i += LANES) {
                int lanes = int(std::min<int64_t>(LANES, to - i));
                F value = own(load_part(a + i, lanes), load_part(b + i, lanes), load_part(w + i, lanes));
                store_part(out.row(row) + i, value, lanes);
            }
        });
    }
};

template <class Each>
OpPtr mixed(const Three& of, Each each) {
    return std::make_unique<Mixed<Each>>(of, each);
}

// Head by head: both have a sum over the head.
struct PerHead : Op {
    View x, out;
    pst_register shape;
    const float* weight;
    int64_t heads, dim;

    explicit PerHead(const Three& of)
        : x(of.in(0)), out(of.out), shape(of.out), weight(of.weight()), heads(of.op.n[0]) {
        check(heads > 0 && out.width % heads == 0, "heads do not fill the register");
        dim = out.width / heads;
    }
    virtual void head(int64_t row, int64_t at) const = 0;
    void run(Team& team, const Context& context) const override {
        int64_t grain = std::max<int64_t>(1, PIECE / dim);
        for (int64_t i, end; team.next(grain, context.rows(shape) * heads, i, end);)
            for (; i < end; i++) head(i / heads, i % heads * dim);
    }
};

struct RemovalKey final : PerHead {
    explicit RemovalKey(const Three& of) : PerHead(of) {}
    void head(int64_t row, int64_t at) const override {
        const float *from = x.row(row) + at, *w = weight + at;
        float* to = out.row(row) + at;
        RowSum squares;
        each_vector(int(dim), [&](int i, int lanes) {
            F scaled = load_part(from + i, lanes) * load_part(w + i, lanes);
            squares.add_square(scaled);
            store_part(to + i, scaled, lanes);
        });
        float length = std::sqrt(squares.value());
        if (length < 1e-12f) length = 1e-12f;  // a NaN stays one
        each_vector(int(dim), [&](int i, int lanes) {
            store_part(to + i, load_part(to + i, lanes) / all(length), lanes);
        });
    }
};

struct ValueBonus final : PerHead {
    View k, v;
    explicit ValueBonus(const Three& of) : PerHead(of), k(of.in(1)), v(of.in(2)) {}
    void head(int64_t row, int64_t at) const override {
        const float *r = x.row(row) + at, *keys = k.row(row) + at, *values = v.row(row) + at, *w = weight + at;
        float* to = out.row(row) + at;
        RowSum fit;
        each_vector(int(dim), [&](int i, int lanes) {
            fit.add(load_part(r + i, lanes) * load_part(keys + i, lanes) * load_part(w + i, lanes));
        });
        F by = all(fit.value());
        each_vector(int(dim), [&](int i, int lanes) { store_part(to + i, load_part(values + i, lanes) * by, lanes); });
    }
};

}  // namespace

namespace {

// Heads with a number of their own behind them, which a query's 1 carries into the score, and zeros.
struct BiasedHeads final : Op {
    static constexpr int64_t MORE = 4;
    View x, dt, out;
    pst_register shape;
    const float* a;
    float factor;
    int64_t heads, dim;

    BiasedHeads(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), dt(maker.reg(op.in[op.p[0] ? 1 : 0])), out(maker.reg(op.out)), shape(maker.reg(op.out)),
          a(static_cast<const float*>(op.p[0])), factor(op.f[0]), heads(op.n[0]) {
        const pst_register &from = maker.reg(op.in[0]), &by = maker.reg(op.in[a ? 1 : 0]);
        check(heads > 0 && from.width % heads == 0, "heads do not fill the register");
        dim = from.width / heads;
        check(shape.width == from.width + MORE * heads && shape.rows == from.rows && by.rows == from.rows,
              "every head grows by four numbers, of the same rows");
        check(!a || by.width == heads, "there is one bias for each head");
    }
    void run(Team& team, const Context& context) const override {
        int64_t grain = std::max<int64_t>(1, PIECE / (dim + MORE));
        for (int64_t i, end; team.next(grain, context.rows(shape) * heads, i, end);)
            for (; i < end; i++) {
                int64_t row = i / heads, head = i % heads;
                float* to = out.row(row) + head * (dim + MORE);
                std::memcpy(to, x.row(row) + head * dim, size_t(dim) * sizeof(float));
                to[dim] = factor;
                std::fill(to + dim + 1, to + dim + MORE, 0.0f);
                if (!a) continue;
                float lanes[LANES];
                store(lanes, exp(softplus(all(dt.row(row)[head])) * all(a[head])) * all(factor));
                to[dim] = lanes[0];
            }
    }
};

}  // namespace

OpPtr make_biased_heads(const pst_op& op, const Maker& maker) { return std::make_unique<BiasedHeads>(op, maker); }

OpPtr make_rwkv_rows(const pst_op& op, const Maker& maker) {
    Three of(op, maker);
    switch (op.kind) {
        case PST_LERP: return mixed(of, [](F x, F y, F w) { return fma(y - x, w, x); });
        case PST_REPLACEMENT_KEY:
            of.weight();
            return mixed(of, [](F k, F rate, F w) { return k * fma(rate - all(1.0f), w, all(1.0f)); });
        case PST_REMOVAL_KEY: return std::make_unique<RemovalKey>(of);
        default: return std::make_unique<ValueBonus>(of);
    }
}

}  // namespace pst
