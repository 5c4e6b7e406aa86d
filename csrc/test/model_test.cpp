// A layer of a model with every kind of matrix, threads and pages: the same bits however a text is cut into steps,
// whoever else is in them, and on any number of threads.
#include <cmath>
#include <memory>

#include "tiny_matrix.h"
#include "tiny_program.h"

namespace {

constexpr int32_t E = 96, HEADS = 3, D = 32, F = 40, V = 101, MAX_TOKENS = 40, THREADS = 3;
constexpr int32_t PAGE = 4, PAGES = 16, POSITIONS = 64, QKV = (HEADS + 2) * D;

struct Model : TinyProgram {
    Dice dice{77};
    Numbers table = dice.reals(V * E), rope = dice.reals(2 * POSITIONS * (D / 2)), norm = dice.reals(E);
    Matrix qkv, out, up, down, head;
    Bytes keys, values;
    int32_t logits;
    int32_t index[2];
    float value[2];
    uint8_t finite[2];

    explicit Model(Pair kind)
        : TinyProgram(MAX_TOKENS, 2), qkv(kind, QKV, E, false, dice), out(kind, E, HEADS * D, false, dice),
          up(kind, 2 * F, E, true, dice), down(kind, E, F, false, dice), head(kind, V, E, false, dice),
          keys(PAGES * PAGE * D * 4, 0xff), values(PAGES * PAGE * D * 4, 0xff) {
        for (Bytes* plane : {&keys, &values}) planes.push_back({plane->data, PST_F32, 1, D, 0, PAGE * D, D, D});
        num_groups = 1;
        int32_t x = add(E), fused = add(QKV), mixed = add(HEADS * D), inner = add(F);
        int32_t chosen = add(E, PST_ROWS_SELECTED);
        logits = add(V, PST_ROWS_SELECTED);
        int32_t q = part(fused, 0, HEADS * D), k = part(fused, HEADS * D, D), v = part(fused, HEADS * D + D, D);
        op(PST_EMBED, {}, x, {PST_F32, 0}, {1.0f}, {table.data()});
        op(PST_LINEAR, {x}, fused, {1, 0, 0}, {1e-5f, 1.0f}, {&qkv.m, norm.data()});
        op(PST_ROPE, {q}, q, {HEADS, D, 0, D / 2, 0, POSITIONS}, {}, {rope.data()});
        op(PST_ROPE, {k}, k, {1, D, 0, D / 2, 1, POSITIONS}, {}, {rope.data()});
        op(PST_WRITE, {k, v}, -1, {0, 0, 1, D, 1, D, 0, 1});
        op(PST_ATTEND, {q}, mixed, {0, 0, HEADS, 1, D, D, 0, 1, 0, 0}, {0.18f});
        op(PST_LINEAR, {mixed, x}, x, {0, 0, 0}, {0.0f, 0.7f}, {&out.m});
        op(PST_LINEAR, {x}, inner, {2, 2, PST_SILU}, {1e-5f, 1.0f}, {&up.m, norm.data(), norm.data()});
        op(PST_LINEAR, {inner, x}, x, {0, 0, 0}, {0.0f, 1.0f}, {&down.m});
        op(PST_SELECT, {x}, chosen);
        op(PST_LINEAR, {chosen}, logits, {1, 1, PST_TANH}, {1e-5f, 1.0f}, {&head.m, norm.data()});
        op(PST_ARGMAX, {logits}, -1, {}, {}, {index, value, finite});
    }
};

// Sequence 0 is tokens 0 ... 12 on pages 3, 9, 1, 4; sequence 1 tokens 5 ... 11 of the same text on pages 0, 2.
constexpr int32_t TABLE_0[] = {3, 9, 1, 4}, TABLE_1[] = {0, 2};

struct Piece {
    int32_t sequence, first, last;  // its tokens first ... last-1
};

// Runs the pieces as one step; logits of the last token of each.
Numbers run_step(Model& model, pst_pool* pool, const std::vector<Piece>& pieces) {
    std::vector<int32_t> ids, positions, loc{0}, rows, shared, blocks;
    std::vector<const int32_t*> tables;
    for (Piece p : pieces) {
        for (int32_t i = p.first; i < p.last; i++) ids.push_back((i + 5 * p.sequence) * 31 % V), positions.push_back(i);
        loc.push_back(int32_t(ids.size()));
        rows.push_back(int32_t(ids.size()) - 1);
        tables.push_back(p.sequence ? TABLE_1 : TABLE_0);
        shared.push_back(1);
        blocks.push_back((p.last + PAGE - 1) / PAGE);
    }
    pst_group group{1, PAGE, tables.data(), shared.data(), blocks.data(), nullptr, nullptr};
    pst_step step{int32_t(ids.size()), int32_t(pieces.size()), int32_t(rows.size()), 1, ids.data(), positions.data(),
                  loc.data(), rows.data(), &group, nullptr, nullptr};
    const int64_t before = allocations();
    EXPECT(model.run(pool, step) == 0, "it runs");
    EXPECT(allocations() == before, "a step asks for no memory");
    return model.rows(model.logits, int32_t(rows.size()));
}

Numbers half(const Numbers& x, int which) { return Numbers(x.begin() + which * V, x.begin() + (which + 1) * V); }

void cuts(Model& model, pst_pool* pool, Numbers& expected, const char* name) {
    Numbers both = run_step(model, pool, {{0, 0, 13}, {1, 0, 7}});
    for (float v : both) EXPECT(std::isfinite(v), "%s: every number was computed", name);
    EXPECT(model.finite[0] && model.finite[1], "%s: logits are finite", name);
    if (expected.empty()) expected = both;
    EXPECT(same(both, expected), "%s: other bits on %d threads", name, pst_pool_threads(pool));
    run_step(model, pool, {{0, 0, 5}});
    EXPECT(same(run_step(model, pool, {{0, 5, 13}}), half(expected, 0)), "%s: a text in two steps", name);
    run_step(model, pool, {{1, 0, 3}, {0, 0, 2}});
    Numbers last;
    for (int32_t i = 3; i < 7; i++) last = run_step(model, pool, {{0, i - 1, i}, {1, i, i + 1}});
    EXPECT(same(half(last, 1), half(expected, 1)), "%s: token by token, beside another", name);
}

}  // namespace

void test_model() {
    const char* formats[] = {"float32", "float16", "bfloat16"};
    const char* acts[] = {"float32", "bfloat16", "8-bit"};
    for (Pair kind : PAIRS) {
        Model model(kind);
        std::string name = (kind.rounded() ? kind.code == PST_C_U8 ? "8-bit" : "4-bit" : std::string(formats[kind.format])) + " weights, " + acts[kind.act] + " rows";
        bool made = model.make(THREADS);
        EXPECT(made, "%s: %s", name.c_str(), model.error.c_str());
        if (!made) continue;
        Numbers expected;
        for (int threads = 1; threads <= THREADS; threads++) {
            pst_pool* pool = pst_pool_new(threads, 5, 0);
            cuts(model, pool, expected, name.c_str());
            pst_pool_free(pool);
        }
    }
}
