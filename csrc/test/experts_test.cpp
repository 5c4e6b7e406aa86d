// Routing and experts with threads: the same bits however a step is cut and on any number of threads, nothing read or
// written beyond what is there, no memory asked for.
#include <cmath>
#include <memory>

#include "tiny_matrix.h"
#include "tiny_program.h"

namespace {

constexpr int32_t X = 9, K = 3, E = 70, F = 45, T = 61, THREADS = 5;

struct ExpertsProgram : TinyProgram {
    Dice dice{3};
    std::vector<std::unique_ptr<Matrix>> kept;
    std::vector<pst_matrix> first, beside, down;
    Numbers correction = dice.reals(X);
    int32_t x, logits, routes, out;

    // `apart`: gate and up are two matrices.
    ExpertsProgram(Pair kind, bool apart, bool scale_input) : TinyProgram(T, 1) {
        for (int32_t e = 0; e < X; e++) {
            first.push_back(matrix(kind, apart ? F : 2 * F, E, !apart));
            if (apart) beside.push_back(matrix(kind, F, E, false));
            down.push_back(matrix(kind, E, F, false));
        }
        x = add(E), logits = add(X), routes = add(2 * K), out = add(E);
        op(PST_ROUTE, {logits}, routes, {K, 1, 3, 2, 1, 1, 0}, {1.5f}, {correction.data()});
        op(PST_EXPERTS, {x, routes, x}, out, {X, K, scale_input, PST_SILU}, {},
           {first.data(), apart ? beside.data() : nullptr, down.data()});
        EXPECT(make(THREADS), "%s", error.c_str());
    }
    pst_matrix matrix(Pair kind, int32_t rows, int32_t cols, bool pair) {
        kept.push_back(std::make_unique<Matrix>(kind, rows, cols, pair, dice));
        return kept.back()->m;
    }
    // Tokens first ... first+count-1 of a text that is always the same.
    Numbers step(pst_pool* pool, int32_t from, int32_t count) {
        for (int32_t t = 0; t < count; t++) {
            Dice of_token{uint32_t(from + t + 1)};
            for (int32_t i = 0; i < E; i++) registers[size_t(x)].data[t * E + i] = of_token.real();
            // Every second token chooses among few: some experts have many rows, some have none.
            for (int32_t i = 0; i < X; i++)
                registers[size_t(logits)].data[t * X + i] = of_token.real() + (t % 2 && i < 3 ? 9.0f : 0.0f);
        }
        std::vector<int32_t> zeros(size_t(count) + 1, 0);
        int32_t loc[] = {0, count};
        pst_step step{count, 1, 0, 0, zeros.data(), zeros.data(), loc, zeros.data(), nullptr, nullptr, nullptr};
        const int64_t before = allocations();
        EXPECT(run(pool, step) == 0, "it runs");
        EXPECT(allocations() == before, "a step asks for no memory");
        return rows(out, count);
    }
};

void cuts(ExpertsProgram& p, const char* name) {
    Numbers whole;
    for (int threads = 1; threads <= THREADS; threads += 2) {
        pst_pool* pool = pst_pool_new(threads, 20, 0);
        for (int round = 0; round < (brief ? 1 : 5); round++) {
            Numbers got = p.step(pool, 0, T);
            if (whole.empty()) whole = got;
            for (float v : got) EXPECT(std::isfinite(v), "%s: every number was computed", name);
            EXPECT(same(got, whole), "%s: other bits on %d threads", name, threads);
        }
        for (int32_t at = 0, n = 1; at < T; at += n, n = n * 3 % 14 + 1) {
            const int32_t count = n < T - at ? n : T - at;
            // Tokens with an even place in the step draw as they did: it begins with one.
            if (at % 2) continue;
            const Numbers part(whole.begin() + at * E, whole.begin() + (at + count) * E);
            EXPECT(same(p.step(pool, at, count), part), "%s: tokens %d ... by themselves", name, at);
        }
        EXPECT(p.step(pool, 0, 0).empty(), "no tokens are fine");
        pst_pool_free(pool);
    }
}

}  // namespace

void test_experts() {
    for (Pair kind : {plain(PST_M_F32, PST_A_F32), plain(PST_M_BF16, PST_A_BF16), rounded8(PST_A_I8),
                      rounded4(PST_A_I8, 32), rounded4(PST_A_F32, 32)})
        for (bool apart : {false, true})
            for (bool scale_input : {false, true}) {
                ExpertsProgram p(kind, apart, scale_input);
                if (p.program) cuts(p, apart ? "gate and up apart" : "gate and up as a pair");
            }
}
