// Programs of operations on rows, with threads: what one leaves, the next sees, and who computes it does not matter.
#include <algorithm>
#include <cmath>

#include "tiny_program.h"

namespace {

constexpr int32_t T = 23, R = 3, V = 40, THREADS = 6;

struct RowsProgram : TinyProgram {
    int32_t width;
    Dice dice{5};
    Numbers table, positions_table, weight;
    int32_t index[R];
    float value[R];
    uint8_t finite[R];
    int32_t x, y, both, gate, up, chosen;

    explicit RowsProgram(int32_t width)
        : TinyProgram(T, R), width(width), table(dice.reals(size_t(V * width))),
          positions_table(dice.reals(size_t(64 * width))), weight(dice.reals(size_t(width))) {
        x = add(width), y = add(width), both = add(2 * width), chosen = add(width, PST_ROWS_SELECTED);
        gate = part(both, 0, width), up = part(both, width, width);
        op(PST_EMBED, {}, x, {PST_F32, 0}, {1.0f}, {table.data()});
        op(PST_EMBED, {}, y, {PST_F32, 1}, {0.5f}, {positions_table.data()});
        op(PST_ADD, {x, y}, x);
        op(PST_NORM, {x}, y, {width, 1, 0}, {1e-5f}, {weight.data()});
        op(PST_NORM, {y}, gate, {width, 2, 0}, {1e-5f}, {weight.data(), weight.data()});
        op(PST_MUL, {x, y}, up);
        op(PST_SCALE, {up}, up, {}, {3.0f});
        op(PST_CLIP, {up}, up, {}, {2.0f});
        op(PST_GATED, {gate, up}, up, {PST_SILU});
        for (int32_t a : {PST_GELU, PST_GELU_TANH, PST_RELU, PST_RELU2, PST_SIGMOID, PST_TANH, PST_QUICK_GELU})
            op(PST_ACT, {gate}, gate, {a});
        op(PST_GATED, {up, gate}, gate, {PST_SWIGLU_CLAMPED}, {1.0f});
        op(PST_GATE_ROWS, {gate, up}, gate);
        op(PST_GATE_ROWS, {gate, part(up, width - 1, 1)}, gate);
        op(PST_GATE_ROWS, {gate, up}, gate, {1});
        op(PST_SCALE_QUERIES, {gate}, gate, {}, {0.1f, 8.0f, 1.0f});
        op(PST_ADD, {x, gate}, x);
        op(PST_SELECT, {x}, chosen);
        op(PST_SOFT_CAP, {chosen}, chosen, {}, {30.0f});
        op(PST_ARGMAX, {chosen}, -1, {}, {}, {index, value, finite});
        EXPECT(make(THREADS), "%s", error.c_str());
    }
};

void check(const RowsProgram& p, const Numbers& chosen) {
    for (int32_t r = 0; r < R; r++) {
        auto first = chosen.begin() + r * p.width, top = std::max_element(first, first + p.width);
        EXPECT(p.index[r] == top - first, "row %d: %d, not %d", r, p.index[r], int(top - first));
        EXPECT(p.value[r] == *top && p.finite[r] == 1, "row %d: %g, not %g", r, double(p.value[r]), double(*top));
    }
    for (float v : chosen) EXPECT(std::isfinite(v), "every number was computed");
}

void rows_of(int32_t width) {
    RowsProgram p(width);
    if (!p.program) return;
    std::vector<int32_t> ids, positions;
    for (int32_t t = 0; t < T; t++) ids.push_back(t * 7 % V), positions.push_back(t + 30);
    int32_t loc[] = {0, T}, rows[] = {0, 11, T - 1};
    pst_step step{T, 1, R, 0, ids.data(), positions.data(), loc, rows, nullptr, nullptr, nullptr};
    Numbers x, chosen;
    for (int threads = 1; threads <= THREADS; threads++) {
        pst_pool* pool = pst_pool_new(threads, threads % 2 * 20, 0);
        for (int round = 0; round < (brief ? 1 : 20); round++) {
            EXPECT(p.run(pool, step) == 0, "it runs");
            if (x.empty()) {
                x = p.rows(p.x, T), chosen = p.rows(p.chosen, R);
                check(p, chosen);
            }
            EXPECT(same(p.rows(p.x, T), x), "%d threads, width %d", threads, width);
            EXPECT(same(p.rows(p.chosen, R), chosen), "%d threads, width %d", threads, width);
        }
        pst_pool_free(pool);
    }
}

void steps_that_do_not_fit() {
    RowsProgram p(8);
    if (!p.program) return;
    int32_t zeros[T + 2] = {}, loc[] = {0, T + 1}, rows[R + 2] = {};
    pst_pool* pool = pst_pool_new(2, 0, 0);
    pst_pool* large = pst_pool_new(THREADS + 1, 0, 0);
    pst_step step{T + 1, 1, 0, 0, zeros, zeros, loc, rows, nullptr, nullptr, nullptr};
    EXPECT(p.run(pool, step) == -1, "too many tokens");
    step.num_tokens = T, step.num_rows = R + 1;
    EXPECT(p.run(pool, step) == -1, "too many rows");
    step.num_rows = R;
    EXPECT(p.run(large, step) == -1, "too many threads");
    EXPECT(pst_program_run(p.program, pool, &step, -1, 2) == -1, "no such operation");
    EXPECT(pst_program_run(p.program, pool, &step, 0, int32_t(p.ops.size()) + 1) == -1, "no such operation");
    EXPECT(pst_program_run(p.program, pool, &step, 3, 3) == 0, "none is fine");
    step.num_tokens = step.num_rows = 0;
    EXPECT(p.run(pool, step) == 0, "and so is a step of nothing");
    std::vector<int64_t> nanoseconds(p.ops.size(), -1);
    pst_program_profile(p.program, nanoseconds.data());
    for (int64_t n : nanoseconds) EXPECT(n == 0, "nothing was counted yet");
    step.num_tokens = T;
    p.run(pool, step);
    pst_program_profile(p.program, nanoseconds.data());
    for (int64_t n : nanoseconds) EXPECT(n > 0, "every operation takes time");
    pst_pool_free(pool);
    pst_pool_free(large);
}

}  // namespace

void test_rows() {
    for (int32_t width : {1, 17, 300, 5003}) rows_of(width);
    steps_that_do_not_fit();
}
