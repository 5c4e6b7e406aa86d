// PST_NORM: every stretch of a row normed by itself.
#include "norm_row.h"
#include "pieces.h"

namespace pst {

namespace {

struct NormOp final : Op {
    View in, out;
    pst_register shape;
    Norm norm;
    int64_t stretch;      // numbers that are normed together
    int64_t weight_step;  // from the weights of one stretch to those of the next

    NormOp(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), out(maker.reg(op.out)), shape(maker.reg(op.out)), stretch(op.n[0]),
          weight_step(op.n[2] ? op.n[0] : 0) {
        check(in.width == out.width, "a norm's output is as wide as its input");
        check(maker.reg(op.in[0]).rows == shape.rows, "a norm's output has the rows of its input");
        check(stretch > 0 && out.width % stretch == 0, "a row is a whole number of normed stretches");
        check(op.n[1] == NORM_RMS || op.n[1] == NORM_LAYER, "a norm is rms (1) or layer (2)");
        check(op.n[2] == 0 || op.n[2] == 1, "a norm's weights are for every stretch (0) or for the row (1)");
        norm.kind = op.n[1];
        norm.eps = op.f[0];
        norm.weight = static_cast<const float*>(op.p[0]);
        norm.bias = static_cast<const float*>(op.p[1]);
        check(!norm.bias || norm.kind == NORM_LAYER, "a bias belongs to a layer norm");
    }
    void run(Team& team, const Context& context) const override {
        int64_t stretches = out.width / stretch, grain = std::max<int64_t>(1, PIECE / stretch);
        for (int64_t first, last; team.next(grain, context.rows(shape) * stretches, first, last);)
            for (int64_t i = first; i < last; i++) one(i / stretches, i % stretches);
    }
    void one(int64_t row, int64_t s) const {
        Norm own = norm;
        if (own.weight) own.weight += s * weight_step;
        if (own.bias) own.bias += s * weight_step;
        norm_row(in.row(row) + s * stretch, int(stretch), own, out.row(row) + s * stretch);
    }
};

}  // namespace

OpPtr make_norm(const pst_op& op, const Maker& maker) { return std::make_unique<NormOp>(op, maker); }

}  // namespace pst
