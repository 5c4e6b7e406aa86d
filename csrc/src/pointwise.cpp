// Operations that make each number of a row from the numbers at its place: all may run in place.
#include <cmath>
#include <type_traits>

#include "activation.h"
#include "pieces.h"

namespace pst {

// embed.cpp: PST_EMBED, SELECT, ARGMAX.
OpPtr make_row_op(const pst_op& op, const Maker& maker);

namespace {

const char* const SAME_SHAPE = "the registers of an operation on numbers are equally wide and have the same rows";

void check_same(const pst_register& a, const pst_register& b) {
    check(a.width == b.width && a.rows == b.rows, SAME_SHAPE);
}

// out = each(in)
template <class Each>
struct Unary final : Op {
    View in, out;
    pst_register shape;
    Each each;

    Unary(const pst_register& x, const pst_register& y, Each each) : in(x), out(y), shape(y), each(each) {
        check_same(x, y);
    }
    void run(Team& team, const Context& context) const override {
        Each own = each;  // a copy that no store can change, so its constants stay in registers
        each_piece(team, context.rows(shape), out.width, [&](int64_t row, int64_t from, int64_t to) {
            map(in.row(row) + from, out.row(row) + from, to - from, own);
        });
    }
};

// out = each(x, y)
template <class Each>
struct Binary final : Op {
    View x, y, out;
    pst_register shape;
    Each each;

    Binary(const pst_register& a, const pst_register& b, const pst_register& to, Each each)
        : x(a), y(b), out(to), shape(to), each(each) {
        check_same(a, to);
        check_same(b, to);
    }
    void run(Team& team, const Context& context) const override {
        Each own = each;
        each_piece(team, context.rows(shape), out.width, [&](int64_t row, int64_t from, int64_t to) {
            map(x.row(row) + from, y.row(row) + from, out.row(row) + from, to - from, own);
        });
    }
};

// out = in * one factor per row
template <class Factor>
struct ScaledRows final : Op {
    View in, out;
    pst_register shape;
    Factor factor;

    ScaledRows(const pst_register& x, const pst_register& y, Factor factor) : in(x), out(y), shape(y), factor(factor) {
        check_same(x, y);
    }
    void run(Team& team, const Context& context) const override {
        each_piece(team, context.rows(shape), out.width, [&](int64_t row, int64_t from, int64_t to) {
            F by = all(factor(context, row));
            map(in.row(row) + from, out.row(row) + from, to - from, [by](F x) { return x * by; });
        });
    }
};

struct Registers {
    const pst_op& op;
    const Maker& maker;

    const pst_register& in(int i) const { return maker.reg(op.in[i]); }
    const pst_register& out() const { return maker.reg(op.out); }

    template <class Each>
    OpPtr unary(Each each) const {
        return std::make_unique<Unary<Each>>(in(0), out(), each);
    }
    template <class Each>
    OpPtr binary(Each each) const {
        return std::make_unique<Binary<Each>>(in(0), in(1), out(), each);
    }
    template <class Factor>
    OpPtr scaled_rows(Factor factor) const {
        return std::make_unique<ScaledRows<Factor>>(in(0), out(), factor);
    }
};

template <int A>
using Constant = std::integral_constant<int, A>;

// `make` of the activation as a constant: the choice is made once, not per number.
template <class Make>
OpPtr for_activation(int activation, Make make) {
    switch (activation) {
        case PST_SILU: return make(Constant<PST_SILU>());
        case PST_GELU: return make(Constant<PST_GELU>());
        case PST_GELU_TANH: return make(Constant<PST_GELU_TANH>());
        case PST_RELU: return make(Constant<PST_RELU>());
        case PST_RELU2: return make(Constant<PST_RELU2>());
        case PST_SIGMOID: return make(Constant<PST_SIGMOID>());
        case PST_TANH: return make(Constant<PST_TANH>());
        case PST_QUICK_GELU: return make(Constant<PST_QUICK_GELU>());
    }
    throw Misfit("no such activation, or one for gates only");
}

OpPtr make_activation(const Registers& r) {
    if (r.op.n[0] == PST_XIELU) {
        float positive = r.op.f[0], negative = r.op.f[1];
        return r.unary([=](F x) { return xielu(x, positive, negative); });
    }
    auto make = [&](auto a) { return r.unary([](F x) { return activate(x, decltype(a)::value); }); };
    return for_activation(r.op.n[0], make);
}

// out = act(gate) * up, of rows in which 32 of the one and 32 of the other take turns
template <class Each>
struct GatedPairs final : Op {
    View in, out;
    pst_register shape;
    Each each;

    GatedPairs(const pst_register& x, const pst_register& y, Each each) : in(x), out(y), shape(y), each(each) {
        check(x.rows == y.rows && x.width >= (y.width + 31) / 32 * 64, "pairs are twice as wide as what comes of them");
    }
    void run(Team& team, const Context& context) const override {
        Each own = each;
        each_piece(team, context.rows(shape), out.width, [&](int64_t row, int64_t from, int64_t to) {
            for (; from < to; from += 32) {
                const float* gate = in.row(row) + 2 * from;
                map(gate, gate + 32, out.row(row) + from, std::min<int64_t>(32, to - from), own);
            }
        });
    }
};

OpPtr make_gated(const Registers& r) {
    float limit = r.op.f[0];
    const bool pairs = r.op.n[1] == 1;
    auto make = [&](auto a) -> OpPtr {
        auto each = [limit](F gate, F up) { return activate_gated(gate, up, decltype(a)::value, limit); };
        if (pairs) return std::make_unique<GatedPairs<decltype(each)>>(r.in(0), r.out(), each);
        return r.binary(each);
    };
    switch (r.op.n[0]) {
        case PST_SWIGLU_CLAMPED: return make(Constant<PST_SWIGLU_CLAMPED>());
        case PST_SILU_CLAMPED: return make(Constant<PST_SILU_CLAMPED>());
    }
    return for_activation(r.op.n[0], make);
}

// The limit on the left: `max` and `min` give their right side if one is NaN, and a NaN must stay to be seen.
OpPtr make_clip(const Registers& r) {
    float limit = r.op.f[0];
    return r.unary([limit](F x) { return min(all(limit), max(all(-limit), x)); });
}

OpPtr make_soft_cap(const Registers& r) {
    float cap = r.op.f[0];
    check(cap > 0, "a soft cap is larger than 0");
    return r.unary([cap](F x) { return activate(x / all(cap), PST_TANH) * all(cap); });
}

template <class By>
OpPtr gated_rows(const Registers& r, By by) {
    const pst_register& gate = r.in(1);
    check(gate.rows == r.in(0).rows, SAME_SHAPE);
    if (gate.width == r.in(0).width) return r.binary([by](F x, F g) { return x * by(g); });
    check(gate.width == 1, "a gate has one number per row, or as many as what it gates");
    View view(gate);
    return r.scaled_rows([view, by](const Context&, int64_t row) {
        float lanes[LANES];
        store(lanes, by(all(*view.row(row))));
        return lanes[0];
    });
}

// out = in * weight by columns
struct ScaledColumns final : Op {
    View in, out;
    pst_register shape;
    const float* weight;

    explicit ScaledColumns(const Registers& r)
        : in(r.in(0)), out(r.out()), shape(r.out()), weight(static_cast<const float*>(r.op.p[0])) {
        check_same(r.in(0), shape);
    }
    void run(Team& team, const Context& context) const override {
        each_piece(team, context.rows(shape), out.width, [&](int64_t row, int64_t from, int64_t to) {
            map(in.row(row) + from, weight + from, out.row(row) + from, to - from, [](F x, F w) { return x * w; });
        });
    }
};

OpPtr make_scale_columns(const Registers& r) { return std::make_unique<ScaledColumns>(r); }
OpPtr make_gate_rows(const Registers& r) {
    if (r.op.n[0]) return gated_rows(r, [](F g) { return softplus(g); });
    return gated_rows(r, [](F g) { return activate(g, PST_SIGMOID); });
}

OpPtr make_scale_queries(const Registers& r) {
    double beta = double(r.op.f[0]);
    auto floor = int64_t(r.op.f[1]), shift = int64_t(r.op.f[2]);
    check(floor > 0 && shift >= 0, "queries are scaled by floor((position + f2) / f1) for f1 > 0 and f2 >= 0");
    return r.scaled_rows([=, shape = r.out()](const Context& context, int64_t row) {
        int64_t turns = (context.position(shape, row) + shift) / floor;
        return float(1.0 + beta * std::log1p(double(turns)));
    });
}

}  // namespace

OpPtr make_pointwise(const pst_op& op, const Maker& maker) {
    Registers r{op, maker};
    float f0 = op.f[0];
    switch (op.kind) {
        case PST_ADD:
            if (f0 != 0.0f) return r.binary([f0](F x, F y) { return fma(all(f0), y, x); });
            return r.binary([](F x, F y) { return x + y; });
        case PST_MUL: return r.binary([](F x, F y) { return x * y; });
        case PST_SCALE: return op.p[0] ? make_scale_columns(r) : r.unary([f0](F x) { return x * all(f0); });
        case PST_CLIP: return make_clip(r);
        case PST_SOFT_CAP: return make_soft_cap(r);
        case PST_ACT: return make_activation(r);
        case PST_GATED: return make_gated(r);
        case PST_GATE_ROWS: return make_gate_rows(r);
        case PST_SCALE_QUERIES: return make_scale_queries(r);
        default: return make_row_op(op, maker);
    }
}

}  // namespace pst
