// Streams, and entries that several tokens share, with threads: one text in steps of several sizes, with and without
// another beside it, in pages that lie anywhere.
#include <algorithm>

#include "tiny_program.h"

namespace {

constexpr int32_t T = 23, S = 4, M = 3, H = 5, D = 22, WINDOW = 6, TOP = 3, HALF = 3, N = 3, E = 37, WIDE = (2 + N) * N;
constexpr int32_t PAGES = 2 * ((T + S - 1) / S), ROWS = (S + M - 1) / M, THREADS = 4;

struct Entries : TinyProgram {
    Dice dice{23};
    std::vector<Numbers> fixed;
    std::vector<Bytes> memory;
    std::vector<int32_t> inputs, results;

    int32_t input(int32_t width) {
        inputs.push_back(add(width));
        return inputs.back();
    }
    int32_t result(int32_t width) {
        results.push_back(add(width));
        return results.back();
    }
    const float* weights(size_t count) {
        fixed.push_back(dice.reals(count));
        return fixed.back().data();
    }
    // Numbers of a page's `rows` begin as NaN: who reads what nobody wrote shows it.
    int32_t plane(int32_t rows, int32_t dim, int32_t dtype = PST_F32) {
        memory.emplace_back(int64_t(PAGES) * rows * dim * (dtype == PST_F32 ? 4 : 2), 0xff);
        planes.push_back({memory.back().data, dtype, 1, dim, 0, int64_t(rows) * dim, dim, dim});
        return int32_t(planes.size()) - 1;
    }
    explicit Entries(int32_t dtype) : TinyProgram(2 * T, 1) {
        num_groups = 1;
        fixed.reserve(20), memory.reserve(20);
        int32_t q = input(H * D), w = input(H), k = input(D), value = input(2 * D), score = input(2 * D);
        const int32_t values = plane(S, 2 * D), scores = plane(S, 2 * D), keys = plane(S, D, dtype), far = plane(ROWS, D, dtype),
                      apart = plane(ROWS, D, dtype);
        const float* table = weights(2 * T * HALF);
        op(PST_WRITE, {value, score}, -1, {0, 0, 1, 2 * D, 1, 2 * D, values, scores});
        op(PST_WRITE, {k}, -1, {0, 0, 1, D, 0, 0, keys});
        op(PST_WRITE_ENTRIES, {}, -1, {0, 0, values, scores, 0, 0, far, M, 1, T, 1, HALF}, {1e-6f},
           {weights(M * 2 * D), weights(D), table});
        const int32_t chosen = result(TOP);
        op(PST_CHOOSE_ENTRIES, {q, w}, chosen, {0, 0, far, M, H, D, T / M}, {0.3f});
        op(PST_ATTEND_ENTRIES, {q, chosen}, result(H * D), {0, 0, keys, 0, 0, far, M, WINDOW, H, D}, {0.3f}, {weights(H)});
        op(PST_ATTEND_ENTRIES, {q}, result(H * D), {0, 0, keys, 0, 0, far, M, WINDOW, H, D}, {0.3f}, {weights(H)});
        // Entries that do not overlap, of planes half as wide.
        const int32_t v = part(value, 0, D), s = part(score, D, D), plain = plane(S, D), plain_scores = plane(S, D);
        op(PST_WRITE, {v, s}, -1, {0, 0, 1, D, 1, D, plain, plain_scores});
        op(PST_WRITE_ENTRIES, {}, -1, {0, 0, plain, plain_scores, 0, 0, apart, M, 0, T, 0, HALF}, {1e-6f},
           {weights(M * D), weights(D), table});
        op(PST_ATTEND_ENTRIES, {q}, result(H * D), {0, 0, keys, 0, 0, apart, M, WINDOW, H, D}, {0.3f}, {weights(H)});
        int32_t x = input(E), mixed = input(WIDE), streams = result(N * E);
        op(PST_SPREAD, {x}, streams, {N});
        op(PST_WEIGH_STREAMS, {mixed}, mixed, {N, 3}, {1e-6f}, {weights(3), weights(WIDE)});
        op(PST_MIX_STREAMS, {streams, mixed, x}, streams, {N});
        op(PST_COLLAPSE_STREAMS, {streams, mixed}, result(E), {N});
        bool made = make(THREADS);
        EXPECT(made, "%s", error.c_str());
    }
};

// Tokens of a text: its rows of every input, and where its blocks lie.
struct Text {
    std::vector<Numbers> rows;
    std::vector<int32_t> pages;
    Text(const Entries& s, uint32_t seed, int32_t first_page) {
        Dice dice{seed};
        for (int32_t r : s.inputs) rows.push_back(dice.reals(size_t(T * s.registers[size_t(r)].width)));
        for (int32_t i = 0; i < PAGES / 2; i++) pages.push_back((first_page + 5 * i) % (PAGES / 2) + first_page);
    }
};

struct Piece {
    const Text* text;
    int32_t first, count;
};

std::vector<Numbers> step(Entries& s, pst_pool* pool, const std::vector<Piece>& pieces) {
    std::vector<int32_t> positions, loc{0}, shared, strides;
    std::vector<const int32_t*> tables;
    for (const Piece& p : pieces) {
        for (int32_t i = 0; i < p.count; i++) positions.push_back(p.first + i);
        for (size_t i = 0; i < s.inputs.size(); i++) {
            const pst_register& r = s.registers[size_t(s.inputs[i])];
            std::copy_n(p.text->rows[i].begin() + p.first * r.width, p.count * r.width, r.data + loc.back() * r.width);
        }
        loc.push_back(loc.back() + p.count);
        shared.push_back(1), strides.push_back(PAGES / 2), tables.push_back(p.text->pages.data());
    }
    std::vector<int32_t> ids(positions.size(), 0);
    pst_group group{1, S, tables.data(), shared.data(), strides.data(), nullptr, nullptr};
    pst_step args{loc.back(), int32_t(pieces.size()), 0, 1, ids.data(), positions.data(), loc.data(), loc.data(),
                  &group, nullptr, nullptr};
    int32_t failed = s.run(pool, args);
    EXPECT(failed == 0, "it runs");
    std::vector<Numbers> out;
    for (int32_t r : s.results) out.push_back(s.rows(r, loc.back()));
    std::vector<uint64_t> mask(positions.size(), 0);
    args.mask = mask.data();
    mask.back() = 1;
    failed = s.run(pool, args);
    EXPECT(failed == -1, "entries follow one path");
    return out;
}

void one_text(int32_t dtype) {
    Entries s(dtype);
    if (!s.program) return;
    Text text(s, 1, 0), other(s, 2, PAGES / 2);
    pst_pool* one = pst_pool_new(1, 0, 0);
    const std::vector<Numbers> whole = step(s, one, {{&text, 0, T}});
    for (const Numbers& numbers : whole)
        for (float x : numbers) EXPECT(x == x, "everything that is read has been written");
    for (int32_t size : {1, 2, 7, T}) {
        pst_pool* pool = pst_pool_new(1 + size % THREADS, 20, 0);
        for (int32_t at = 0; at < T; at += size) {
            int32_t count = std::min(size, T - at), company = at % 3 * 4;
            std::vector<Numbers> got = step(s, pool, {{&other, 0, company}, {&text, at, count}});
            for (size_t i = 0; i < got.size(); i++) {
                int32_t width = s.registers[size_t(s.results[i])].width;
                bool equal = std::equal(got[i].begin() + company * width, got[i].end(), whole[i].begin() + at * width);
                EXPECT(equal, "result %d, steps of %d, token %d", int(i), size, at);
            }
        }
        pst_pool_free(pool);
    }
    pst_pool_free(one);
}

}  // namespace

void test_entries() {
    one_text(PST_F32);
    one_text(PST_BF16);
}
