// Sparse latent attention: a choice of tokens, and attention over those. The same bits however a text is cut into steps, and
// on any number of threads; a node of a tree chooses among its path; every buffer ends where its numbers do.
#include <cmath>

#include "tiny_program.h"

namespace {

constexpr int32_t HEADS = 3, DIM = 10, INDEX_HEADS = 9, INDEX_DIM = 21, K = 6, V = 60, MAX_TOKENS = 40, THREADS = 3;
constexpr int32_t PAGE = 4, PAGES = 16, TOKENS = 37;

int32_t bytes_of(int32_t dtype) { return dtype == PST_F32 ? 4 : dtype == PST_I8 ? 1 : 2; }

struct ChooseProgram : TinyProgram {
    Dice dice{23};
    Numbers queries = dice.reals(V * HEADS * DIM), keys = dice.reals(V * DIM), index_keys = dice.reals(V * INDEX_DIM);
    Numbers index_queries = dice.reals(V * INDEX_HEADS * INDEX_DIM), shares = dice.reals(V * INDEX_HEADS);
    Bytes kept, index, kept_scales, index_scales;
    int32_t chosen, result;

    explicit ChooseProgram(int32_t dtype)
        : TinyProgram(MAX_TOKENS, 1), kept(PAGES * PAGE * DIM * bytes_of(dtype), 0xff),
          index(PAGES * PAGE * INDEX_DIM * bytes_of(dtype), 0xff), kept_scales(PAGES * PAGE * 4, 0xff),
          index_scales(PAGES * PAGE * 4, 0xff) {
        planes.push_back({kept.data, dtype, 1, DIM, 2, PAGE * DIM, DIM, DIM});
        planes.push_back({index.data, dtype, 1, INDEX_DIM, 3, PAGE * INDEX_DIM, INDEX_DIM, INDEX_DIM});
        for (Bytes* scales : {&kept_scales, &index_scales})
            planes.push_back({scales->data, PST_F32, 1, 1, 0, PAGE, 1, 1});
        num_groups = 1;
        auto rows = [&](const Numbers& table, int32_t width) {
            const int32_t out = add(width);
            op(PST_EMBED, {}, out, {PST_F32, 0}, {1.0f}, {table.data()});
            return out;
        };
        const int32_t q = rows(queries, HEADS * DIM), k = rows(keys, DIM), ik = rows(index_keys, INDEX_DIM);
        const int32_t iq = rows(index_queries, INDEX_HEADS * INDEX_DIM), w = rows(shares, INDEX_HEADS);
        chosen = add(K), result = add(HEADS * DIM);
        op(PST_WRITE, {k}, -1, {0, 0, 1, DIM, 0, 0, 0});
        op(PST_WRITE, {ik}, -1, {0, 0, 1, INDEX_DIM, 0, 0, 1});
        op(PST_CHOOSE, {iq, w}, chosen, {0, 0, INDEX_HEADS, INDEX_DIM, 1, TOKENS}, {0.3f});
        op(PST_ATTEND, {q, chosen}, result, {0, 0, HEADS, 1, DIM, DIM, 0, 0}, {0.4f});
    }

    // Tokens of one sequence at these positions; `masks`: of a tree. What they give, and what they chose.
    std::pair<Numbers, Numbers> step(pst_pool* pool, const std::vector<int32_t>& tokens,
                                     const std::vector<int32_t>& positions, const uint64_t* masks = nullptr) {
        static const int32_t table[] = {3, 9, 1, 4, 11, 0, 7, 2, 15, 14, 13}, blocks[] = {11}, shared[] = {1};
        const auto count = int32_t(tokens.size());
        const int32_t loc[] = {0, count}, *tables[] = {table};
        pst_group group{1, PAGE, tables, shared, blocks, nullptr, nullptr};
        pst_step step{count, 1, 0, 1, tokens.data(), positions.data(), loc, loc, &group, masks, nullptr};
        const int64_t before = allocations();
        EXPECT(run(pool, step) == 0, "it runs");
        EXPECT(allocations() == before, "a step asks for no memory");
        return {rows(result, count), rows(chosen, count)};
    }
    // Tokens first ... last-1 of one text.
    std::pair<Numbers, Numbers> part(pst_pool* pool, int32_t first, int32_t last) {
        std::vector<int32_t> ids, positions;
        for (int32_t i = first; i < last; i++) ids.push_back(i * 31 % V), positions.push_back(i);
        return step(pool, ids, positions);
    }
    // What token t of that text chooses, if keys are kept as they are.
    std::vector<int32_t> expected(int32_t t) const {
        std::vector<double> scores;
        const float* of_t = shares.data() + t * 31 % V * INDEX_HEADS;
        for (int32_t s = 0; s <= t; s++) {
            double score = 0;
            for (int32_t h = 0; h < INDEX_HEADS; h++) {
                double dot = 0;
                for (int32_t d = 0; d < INDEX_DIM; d++)
                    dot += double(index_queries[size_t((t * 31 % V * INDEX_HEADS + h) * INDEX_DIM + d)]) *
                           double(index_keys[size_t(s * 31 % V * INDEX_DIM + d)]);
                score += double(of_t[h]) * std::fmax(0, 0.3 * dot);
            }
            scores.push_back(score);
        }
        std::vector<int32_t> out;
        for (int32_t s = 0; s <= t; s++) {
            int32_t better = 0;
            for (int32_t o = 0; o <= t; o++) better += scores[size_t(o)] > scores[size_t(s)];
            if (better < K) out.push_back(s);
        }
        return out;
    }
};

void texts(ChooseProgram& p, int32_t dtype) {
    Numbers whole;
    for (int threads = 1; threads <= THREADS; threads++) {
        pst_pool* pool = pst_pool_new(threads, 5, 0);
        auto [got, chose] = p.part(pool, 0, TOKENS);
        for (float v : got) EXPECT(std::isfinite(v), "every number was computed");
        if (whole.empty()) whole = got;
        EXPECT(same(got, whole), "planes of %d: other bits on %d threads", dtype, threads);
        for (int32_t t = K; t < TOKENS && dtype == PST_F32; t++) {
            const std::vector<int32_t> want = p.expected(t);
            for (int32_t i = 0; i < K; i++)
                EXPECT(chose[size_t(t * K + i)] == float(want[size_t(i)]), "token %d: choice %d", t, i);
        }
        // Rows that nobody has written yet are NaN.
        for (int32_t i = 0; i < K * K && threads == 1; i++) EXPECT(std::isnan(chose[size_t(i)]), "who sees few chooses nothing");
        Numbers pieces;
        const int32_t cuts[] = {0, 1, 2, 9, 10, 25, 26, TOKENS};
        for (int i = 0; i < 7; i++) {
            const Numbers piece = p.part(pool, cuts[i], cuts[i + 1]).first;
            pieces.insert(pieces.end(), piece.begin(), piece.end());
        }
        EXPECT(same(pieces, whole), "planes of %d: a text in pieces, %d threads", dtype, threads);
        pst_pool_free(pool);
    }
}

// Nodes of a tree behind some tokens have the bits of their paths, each decoded alone.
void trees(ChooseProgram& p, int32_t start) {
    const int32_t parents[] = {-1, 0, 0, 1, 2, 4};
    constexpr int32_t NODES = 6;
    for (int threads = 1; threads <= 2; threads++) {
        pst_pool* pool = pst_pool_new(threads, 5, 0);
        p.part(pool, 0, start);
        std::vector<int32_t> ids, positions;
        uint64_t masks[NODES];
        for (int32_t i = 0; i < NODES; i++) {
            masks[i] = uint64_t(1) << i | (parents[i] < 0 ? 0 : masks[parents[i]]);
            ids.push_back(40 + i), positions.push_back(start + __builtin_popcountll(masks[i]) - 1);
        }
        const Numbers tree = p.step(pool, ids, positions, masks).first;
        for (int32_t i = 0; i < NODES; i++) {
            std::vector<int32_t> path, at;
            for (int32_t n = 0; n <= i; n++)
                if (masks[i] >> n & 1) path.push_back(ids[size_t(n)]), at.push_back(start + int32_t(at.size()));
            const Numbers alone = p.step(pool, path, at).first;
            EXPECT(!std::memcmp(alone.data() + (path.size() - 1) * HEADS * DIM, tree.data() + i * HEADS * DIM,
                                HEADS * DIM * sizeof(float)), "node %d behind %d tokens", i, start);
            p.step(pool, ids, positions, masks);
        }
        pst_pool_free(pool);
    }
}

}  // namespace

void test_choose() {
    for (int32_t dtype : {PST_F32, PST_F16, PST_BF16, PST_I8}) {
        ChooseProgram p(dtype);
        EXPECT(p.make(THREADS), "%s", p.error.c_str());
        if (!p.program) continue;
        texts(p, dtype);
        for (int32_t start : {0, 3, K - 2, K, 21}) trees(p, start);
    }
}
