// The self-test of attention over whole texts, against double precision.
#include "selftest.h"

namespace pst {

namespace {

constexpr int T = 37, H = 2, D = 20, W = H * D, NEAR = 5;

}  // namespace

std::string text_fault() {
    Tiny tiny{T};
    Dice dice{91};
    const Numbers q = dice.reals(T * W), k = dice.reals(T * W), v = dice.reals(T * W);
    const int32_t queries = tiny.add(q), keys = tiny.add(k), values = tiny.add(v);
    std::string fault;
    for (int near : {0, NEAR}) {
        const int32_t out = tiny.add(Numbers(T * W));
        pst_op& op = tiny.op(PST_ATTEND_TEXT, queries, keys, out);
        op.in[2] = values, op.n[0] = H, op.n[1] = near, op.f[0] = 0.5f;
    }
    fault = tiny.run("a text");
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++)
            for (int n = 0; n < 2 && fault.empty(); n++) {
                double total = 0, sum[D] = {};
                for (int j = 0; j < T; j++) {
                    if (n && std::abs(j - t) >= NEAR) continue;
                    double score = 0;
                    for (int d = 0; d < D; d++) score += double(q[size_t(t * W + h * D + d)]) * k[size_t(j * W + h * D + d)];
                    const double weight = std::exp(0.5 * score);
                    total += weight;
                    for (int d = 0; d < D; d++) sum[d] += weight * v[size_t(j * W + h * D + d)];
                }
                for (int d = 0; d < D && fault.empty(); d++)
                    fault = off("a text", tiny.buffers[size_t(values + 1 + n)][size_t(t * W + h * D + d)], sum[d] / total, 1e-5);
            }
    return fault;
}

}  // namespace pst
