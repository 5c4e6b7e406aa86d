// Operations that keep states, with threads, in memory of exactly their size: one text in steps of several sizes, with and
// without another beside it.
#include <algorithm>
#include <cmath>

#include "tiny_program.h"

namespace {

constexpr int32_t T = 19, PAGES = 3, H = 3, K = 10, W = 70, C = 300, TAPS = 4, RANK = 5, THREADS = 4;

struct States : TinyProgram {
    Dice dice{17};
    std::vector<Numbers> fixed;
    std::vector<Bytes> memory;
    std::vector<int32_t> inputs, results;

    int32_t input(int32_t width) {
        inputs.push_back(add(width));
        return inputs.back();
    }
    const float* weights(size_t count, float by = 1.0f) {
        fixed.push_back(dice.reals(count));
        for (float& x : fixed.back()) x *= by;
        return fixed.back().data();
    }
    const float* below_zero(size_t count) {
        weights(count);
        for (float& x : fixed.back()) x = -std::fabs(x);
        return fixed.back().data();
    }
    int32_t plane(int32_t heads, int32_t dim) {
        memory.emplace_back(int64_t(PAGES) * heads * dim * 4, 0xff);
        planes.push_back({memory.back().data, PST_F32, heads, dim, 0, int64_t(heads) * dim, 0, dim});
        return int32_t(planes.size()) - 1;
    }
    int32_t result(int32_t width) {
        results.push_back(add(width));
        return results.back();
    }
    States() : TinyProgram(2 * T, 1) {
        num_groups = 1;
        fixed.reserve(40), memory.reserve(40);
        int32_t x = input(C), dt = input(C), b = input(RANK), c = input(RANK), mixed = add(C);
        op(PST_CONV, {x}, mixed, {0, 0, plane(TAPS - 1, C), TAPS, 1}, {}, {weights(TAPS * C), weights(C)});
        op(PST_SCAN, {mixed, dt, b, c}, result(C), {0, 0, plane(RANK, C)}, {}, {weights(C * RANK, -0.5f), weights(C)});
        op(PST_SHIFT, {x}, result(C), {0, 0, plane(1, C)});
        op(PST_LERP, {x, results.back()}, results.back(), {}, {}, {weights(C)});
        const int32_t num = plane(1, C), den = plane(1, C), top = plane(1, C);
        op(PST_WKV4, {x, results.back()}, results.back(), {0, 0, num, den, top}, {}, {weights(C, -0.5f), weights(C)});
        int32_t q = input(H * K), k = input(H * K), v = input(H * W), one = input(H), rate = input(H * K);
        op(PST_SCAN2, {v, one, b, c}, result(H * W), {0, 0, plane(H, RANK * W), H, RANK, W, 1}, {0.1f, 9.0f},
           {weights(H, -0.5f), weights(H), weights(H)});
        op(PST_RECURRENT, {q, k, v, one}, result(H * W), {0, 0, plane(H, K * W), H, K, W});
        int32_t removal = add(H * K), kept = add(H * K);
        op(PST_REMOVAL_KEY, {k}, removal, {H}, {}, {weights(H * K)});
        op(PST_REPLACEMENT_KEY, {k, rate}, kept, {}, {}, {weights(H * K)});
        op(PST_WKV7, {q, rate, kept, v, removal, rate}, result(H * W), {0, 0, plane(H, K * W), H, K, W});
        op(PST_WKV6, {q, k, v, rate}, result(H * W), {0, 0, plane(H, K * W), H, K, W}, {}, {weights(H * K)});
        const int32_t key = input(K), value = input(W);
        op(PST_WKV6, {q, key, value, rate}, result(H * W), {0, 0, plane(H, K * W), H, K, W, 1}, {0.3f});
        op(PST_WKV6, {q, k, v}, result(H * W), {0, 0, plane(H, K * W), H, K, W}, {}, {weights(H * K), weights(H * K, 0.7f)});
        op(PST_DELTA, {q, k, v, one, one}, result(H * W), {0, 0, plane(H, K * W), H, K, W, H}, {1e-6f, 1.0f},
           {weights(H, -0.5f)});
        op(PST_DELTA, {q, k, v, rate, one}, result(H * W), {0, 0, plane(H, K * W), H, K, W, H}, {1e-6f, 2.0f},
           {weights(H, -0.5f)});
        op(PST_RG_LRU, {x, dt, x}, result(C), {0, 0, plane(1, C)}, {}, {below_zero(C), weights(C), weights(C)});
        const int32_t re = plane(RANK, C), im = plane(RANK, C), re2 = plane(1, C / 2), im2 = plane(1, C / 2);
        op(PST_DIAGONAL, {dt}, result(C), {0, 0, re, im, RANK, 0}, {},
           {weights(2 * C * RANK, 0.3f), weights(2 * C * RANK), weights(C)});
        op(PST_DIAGONAL, {dt}, result(C), {0, 0, re2, im2, 1, 1}, {}, {weights(C, 0.3f), weights(C)});
        const int32_t gates = add(3 * H), sums = plane(H, K), tops = plane(H, 1);
        op(PST_MLSTM_GATES, {one, one, q, k}, gates, {0, 0, sums, tops, H, K}, {1e-6f});
        op(PST_MLSTM, {q, k, v, gates}, result(H * W), {0, 0, plane(H, K * W), H, K, W});
        op(PST_DELTA, {q, k, v, rate, one}, result(H * W), {0, 0, plane(H, K * W), H, K, W, H}, {1e-6f, 1.0f, -5.0f},
           {weights(H)});
        op(PST_BIASED_HEADS, {k, one}, result(H * (K + 4)), {H}, {2.0f}, {weights(H, -0.5f)});
        op(PST_VALUE_BONUS, {q, k, removal}, result(H * K), {H}, {}, {weights(H * K)});
        bool made = make(THREADS);
        EXPECT(made, "%s", error.c_str());
    }
};

// Tokens of a text: its rows of every input.
struct Text {
    std::vector<Numbers> rows;
    Text(const States& s, uint32_t seed) {
        Dice dice{seed};
        for (int32_t r : s.inputs) rows.push_back(dice.reals(size_t(T * s.registers[size_t(r)].width)));
    }
};

struct Piece {
    const Text* text;
    int32_t first, count, page;
};

// What the results of one step are, piece after piece.
std::vector<Numbers> step(States& s, pst_pool* pool, const std::vector<Piece>& pieces) {
    std::vector<int32_t> positions, loc{0}, shared, strides, pages;
    for (const Piece& p : pieces) {
        for (int32_t i = 0; i < p.count; i++) positions.push_back(p.first + i);
        for (size_t i = 0; i < s.inputs.size(); i++) {
            const pst_register& r = s.registers[size_t(s.inputs[i])];
            std::copy_n(p.text->rows[i].begin() + p.first * r.width, p.count * r.width, r.data + loc.back() * r.width);
        }
        loc.push_back(loc.back() + p.count);
        shared.push_back(1), strides.push_back(1), pages.push_back(p.page);
    }
    std::vector<const int32_t*> tables;
    for (int32_t& page : pages) tables.push_back(&page);
    std::vector<int32_t> ids(positions.size(), 0);
    pst_group group{1, 1, tables.data(), shared.data(), strides.data(), nullptr, nullptr};
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
    EXPECT(failed == -1, "a state follows one path");
    return out;
}

}  // namespace

void test_states() {
    States s;
    if (!s.program) return;
    Text text(s, 1), other(s, 2);
    pst_pool* one = pst_pool_new(1, 0, 0);
    const std::vector<Numbers> whole = step(s, one, {{&text, 0, T, 1}});
    for (int32_t size : {1, 2, 7, T}) {
        pst_pool* pool = pst_pool_new(1 + size % THREADS, 20, 0);
        for (int32_t at = 0; at < T; at += size) {
            int32_t count = std::min(size, T - at), company = at % 3 * 4;
            std::vector<Numbers> got = step(s, pool, {{&other, 0, company, 2}, {&text, at, count, 0}});
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
