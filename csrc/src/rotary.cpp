// Rotary positions, in place.
#include "rotary.h"

#include "ops.h"

namespace pst {

namespace {

struct Rope final : Op {
    pst_register x;
    int heads, dim, first, half, num_positions;
    bool interleaved;
    const float* table;  // [2, num_positions, half]

    void run(Team& team, const Context& context) const override {
        // Four pieces a thread: a turned row is short work, so a token at a time would be mostly counting.
        int64_t count = context.rows(x), grain = std::max<int64_t>(1, count / (4 * team.size));
        for (int64_t t, end; team.next(grain, count, t, end);)
            for (; t < end; t++) turn(x.data + t * x.stride, context.position(x, t));
    }

    void turn(float* row, int64_t position) const {
        const float* cosines = table + position * half;
        const float* sines = cosines + int64_t(num_positions) * half;
        for (int h = 0; h < heads; h++) {
            turn_head(row + int64_t(h) * dim + first, cosines, sines, half, interleaved);
        }
    }
};

}  // namespace

OpPtr make_rope(const pst_op& op, const Maker& maker) {
    auto made = std::make_unique<Rope>();
    made->x = maker.reg(op.in[0]);
    made->heads = op.n[0];
    made->dim = op.n[1];
    made->first = op.n[2];
    made->half = op.n[3];
    made->interleaved = op.n[4] != 0;
    made->num_positions = op.n[5];
    made->table = static_cast<const float*>(op.p[0]);
    check(op.out == op.in[0] || op.out == -1, "a rotation works in place");
    check(made->heads > 0 && made->dim > 0 && int64_t(made->heads) * made->dim == made->x.width,
          "heads do not fill the register");
    check(made->first >= 0 && made->half > 0 && made->first + 2 * made->half <= made->dim,
          "a head is smaller than what turns");
    check(made->num_positions > 0 && made->table, "a rotation needs its table");
    return made;
}

}  // namespace pst
