// Latent attention: products of heads around attention over keys of two planes. The same bits however a text is cut into
// steps, and on any number of threads; every buffer ends where its numbers do.
#include <cmath>

#include "tiny_program.h"

namespace {

constexpr int32_t HEADS = 16, NOPE = 12, ROPE = 6, RANK = 70, WIDTH = 20, V = 50, MAX_TOKENS = 32, THREADS = 3;
constexpr int32_t PAGE = 4, PAGES = 16, TOKENS = 29, Q = HEADS * (NOPE + ROPE);

// A matrix [rows, cols] for each head, whose panels begin anew with it.
struct HeadMatrix {
    Numbers source;
    pst_matrix m;
    Bytes data;

    static int32_t filled(int32_t rows) { return (rows + 63) / 64 * 64; }
    HeadMatrix(Pair kind, int32_t rows, int32_t cols, Dice& dice)
        : source(dice.reals(size_t(HEADS * rows * cols))), m(kind.matrix(HEADS * filled(rows), cols)),
          data(m.rows / 64 * pst_panel_bytes(&m)) {
        std::vector<const void*> row_of(size_t(m.rows), nullptr);
        for (int32_t h = 0; h < HEADS; h++)
            for (int32_t i = 0; i < rows; i++)
                row_of[size_t(h * filled(rows) + i)] = source.data() + (h * rows + i) * cols;
        EXPECT(!pst_pack(&m, PST_F32, row_of.data(), 0, m.rows / 64, data.data), "floats are packed");
        m.data = data.data;
    }
};

struct LatentProgram : TinyProgram {
    Dice dice{41};
    Numbers queries = dice.reals(V * Q), latents = dice.reals(V * (RANK + ROPE));
    HeadMatrix keys, values;
    Bytes latent, rotated, latent_scales, rotated_scales;
    int32_t result;

    LatentProgram(Pair kind, int32_t dtype)
        : TinyProgram(MAX_TOKENS, 1), keys(kind, RANK, NOPE, dice), values(kind, WIDTH, RANK, dice),
          latent(PAGES * PAGE * RANK * (dtype == PST_F32 ? 4 : dtype == PST_I8 ? 1 : 2), 0xff),
          rotated(PAGES * PAGE * ROPE * (dtype == PST_F32 ? 4 : dtype == PST_I8 ? 1 : 2), 0xff),
          latent_scales(PAGES * PAGE * 4, 0xff), rotated_scales(PAGES * PAGE * 4, 0xff) {
        planes.push_back({latent.data, dtype, 1, RANK, 2, PAGE * RANK, RANK, RANK});
        planes.push_back({rotated.data, dtype, 1, ROPE, 3, PAGE * ROPE, ROPE, ROPE});
        for (Bytes* scales : {&latent_scales, &rotated_scales})
            planes.push_back({scales->data, PST_F32, 1, 1, 0, PAGE, 1, 1});
        num_groups = 1;
        int32_t q = add(Q), kv = add(RANK + ROPE), absorbed = add(HEADS * (RANK + ROPE)), mixed = add(HEADS * RANK);
        result = add(HEADS * WIDTH);
        op(PST_EMBED, {}, q, {PST_F32, 0}, {1.0f}, {queries.data()});
        op(PST_EMBED, {}, kv, {PST_F32, 0}, {1.0f}, {latents.data()});
        op(PST_WRITE, {part(kv, 0, RANK), part(kv, RANK, ROPE)}, -1, {0, 0, 1, RANK, 1, ROPE, 0, 1});
        op(PST_LATENT, {q}, absorbed, {HEADS, RANK, 0, ROPE}, {}, {&keys.m});
        op(PST_ATTEND, {absorbed}, mixed, {0, 0, HEADS, 1, RANK + ROPE, RANK, 0, 0, 0, 0, 1, ROPE}, {0.2f});
        op(PST_LATENT, {mixed}, result, {HEADS, WIDTH, 0, 0}, {}, {&values.m});
    }
};

// Tokens first ... last-1 of one text.
Numbers run_step(LatentProgram& p, pst_pool* pool, int32_t first, int32_t last) {
    static const int32_t table[] = {3, 9, 1, 4, 11, 0, 7, 2}, blocks[] = {8}, shared[] = {1};
    std::vector<int32_t> ids, positions;
    for (int32_t i = first; i < last; i++) ids.push_back(i * 31 % V), positions.push_back(i);
    const int32_t loc[] = {0, last - first}, *tables[] = {table};
    pst_group group{1, PAGE, tables, shared, blocks, nullptr, nullptr};
    pst_step step{last - first, 1, 0, 1, ids.data(), positions.data(), loc, loc, &group, nullptr, nullptr};
    const int64_t before = allocations();
    EXPECT(p.run(pool, step) == 0, "it runs");
    EXPECT(allocations() == before, "a step asks for no memory");
    return p.rows(p.result, last - first);
}

}  // namespace

void test_latent() {
    for (int32_t dtype : {PST_F32, PST_F16, PST_BF16, PST_I8})
        for (Pair kind : {plain(PST_M_F32, PST_A_F32), plain(PST_M_F16, PST_A_F32), plain(PST_M_BF16, PST_A_BF16), rounded8(PST_A_I8)}) {
            LatentProgram p(kind, dtype);
            EXPECT(p.make(THREADS), "%s", p.error.c_str());
            if (!p.program) continue;
            Numbers whole;
            for (int threads = 1; threads <= THREADS; threads++) {
                pst_pool* pool = pst_pool_new(threads, 5, 0);
                Numbers got = run_step(p, pool, 0, TOKENS);
                for (float v : got) EXPECT(std::isfinite(v), "every number was computed");
                if (whole.empty()) whole = got;
                EXPECT(same(got, whole), "planes of %d: other bits on %d threads", dtype, threads);
                Numbers pieces;
                const int32_t cuts[] = {0, 1, 2, 9, 10, TOKENS};
                for (int i = 0; i < 5; i++) {
                    Numbers piece = run_step(p, pool, cuts[i], cuts[i + 1]);
                    pieces.insert(pieces.end(), piece.begin(), piece.end());
                }
                EXPECT(same(pieces, whole), "planes of %d: a text in pieces, %d threads", dtype, threads);
                pst_pool_free(pool);
            }
        }
}
