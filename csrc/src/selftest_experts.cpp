// Routing and experts against double precision.
#include <algorithm>
#include <memory>

#include "selftest.h"

namespace pst {

namespace {

// Seven tokens choose two of four experts each.
struct ExpertsTest {
    static constexpr int T = 7, X = 4, K = 2, E = 40, F = 36;
    Dice dice{41};
    Numbers x = dice.reals(T * E), logits = dice.reals(T * X);
    Numbers gate_up = dice.reals(X * 2 * F * E), down = dice.reals(X * E * F);
    std::vector<std::unique_ptr<Bytes>> memory;

    // Outputs of a panel are 32 gates, then the same of up.
    pst_matrix packed(const float* values, int rows, int cols, bool pair) {
        pst_matrix m{};
        m.format = PST_M_F32, m.act = PST_A_F32, m.rows = rows, m.cols = cols, m.pair = pair, m.factor = 1.0f;
        const int half = PANEL / 2, count = pair ? (rows / 2 + half - 1) / half : (rows + PANEL - 1) / PANEL;
        std::vector<const void*> row_of(size_t(count * PANEL), nullptr);
        for (int i = 0; i < rows; i++) {
            const int of_half = i % (rows / 2), at = of_half / half * PANEL + i / (rows / 2) * half + of_half % half;
            row_of[size_t(pair ? at : i)] = values + i * cols;
        }
        memory.push_back(std::make_unique<Bytes>(count * pst_panel_bytes(&m)));
        m.data = memory.back()->data;
        check(!pst_pack(&m, PST_F32, row_of.data(), 0, count, memory.back()->data), "experts: packing");
        return m;
    }

    std::string fault() {
        std::vector<pst_matrix> first, last;
        for (int e = 0; e < X; e++) {
            first.push_back(packed(gate_up.data() + e * 2 * F * E, 2 * F, E, true));
            last.push_back(packed(down.data() + e * E * F, E, F, false));
        }
        Tiny tiny(T);
        const int32_t in = tiny.add(x), scores = tiny.add(logits), routes = tiny.add(Numbers(T * 2 * K)),
                      out = tiny.add(Numbers(T * E));
        pst_op& route = tiny.op(PST_ROUTE, scores, -1, routes);
        const int32_t how[] = {K, 1, 2, 1, 0, 1, 0}, what[] = {X, K, 0, PST_SILU};
        std::copy(std::begin(how), std::end(how), route.n);
        route.f[0] = 1.5f;
        pst_op& op = tiny.op(PST_EXPERTS, in, routes, out);
        std::copy(std::begin(what), std::end(what), op.n);
        op.p[0] = first.data(), op.p[2] = last.data();
        std::string fault = tiny.run("experts");
        for (int t = 0; t < T && fault.empty(); t++) {
            const float* l = logits.data() + t * X;
            // The group of the best score takes part alone: both of its experts.
            const int one = std::max(l[0], l[1]) >= std::max(l[2], l[3]) ? 0 : 2;
            const double a = sigmoid(l[one]), b = sigmoid(l[one + 1]);
            for (int i = 0; i < E && fault.empty(); i++) {
                const double expected = 1.5 * (a * result(t, one, i) + b * result(t, one + 1, i)) / (a + b);
                fault = off("experts", tiny.buffers[size_t(out)][size_t(t * E + i)], expected, 2e-4);
            }
        }
        return fault;
    }
    double product(int expert, int output, int t) const {
        double y = 0;
        for (int i = 0; i < E; i++)
            y += double(gate_up[size_t((expert * 2 * F + output) * E + i)]) * double(x[size_t(t * E + i)]);
        return y;
    }
    double result(int t, int expert, int output) const {
        double y = 0;
        for (int j = 0; j < F; j++) {
            const double gate = product(expert, j, t);
            y += gate * sigmoid(gate) * product(expert, F + j, t) * double(down[size_t((expert * E + output) * F + j)]);
        }
        return y;
    }
};

}  // namespace

std::string experts_fault() { return ExpertsTest().fault(); }

}  // namespace pst
