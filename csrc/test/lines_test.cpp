// Pages of kv heads' own, forgotten tokens and chosen pages: the bits of a plain cache that holds only what is seen, and
// no byte beyond any plane.
#include <cmath>

#include "tiny_program.h"

namespace {

constexpr int32_t HEADS = 4, G = 2, PER = HEADS / G, D = 19, S = 4, MAX_TOKENS = 3, THREADS = 2;

// A cache of `lines` lines of one sequence, its pages one after the other, exactly as many as it needs.
struct Cache {
    TinyProgram program{MAX_TOKENS, 1};
    std::vector<Bytes> memory;
    int32_t lines, blocks, q, k, v, out;
    std::vector<int32_t> table;
    pst_pages reads;

    Cache(int32_t heads, int32_t lines, int32_t slots, bool bounds)
        : lines(lines), blocks((slots + S - 1) / S), reads{0.0, 2, 3, 2 * S, 1, 64} {
        int32_t in_page = heads / lines, pages = blocks * lines;
        for (int i = 0; i < (bounds ? 4 : 2); i++) {
            int32_t offsets = i < 2 ? S : 1;
            memory.emplace_back(int64_t(pages) * offsets * in_page * D * 4, 0xff);
            program.planes.push_back({memory.back().data, PST_F32, in_page, D, 0, int64_t(offsets) * in_page * D,
                                      int64_t(in_page) * D, D});
        }
        program.num_groups = 1;
        q = program.add(heads * PER * D), k = program.add(heads * D), v = program.add(heads * D);
        out = program.add(heads * PER * D);
        program.op(PST_WRITE, {k, v}, -1, {0, 0, heads, D, heads, D, 0, 1, bounds ? 2 : 0, bounds ? 3 : 0});
        program.op(PST_ATTEND, {q}, out, {0, 0, heads * PER, heads, D, D, 0, 1}, {0.3f},
                   {nullptr, nullptr, nullptr, bounds ? &reads : nullptr});
        for (int32_t i = 0; i < blocks; i++) table.push_back(blocks - 1 - i);
        bool made = program.make(THREADS);
        EXPECT(made, "%s", program.error.c_str());
    }

    // Tokens `first` ... of a text, heads `head` ... of it.
    Numbers run(pst_pool* pool, const struct Text& text, int32_t first, int32_t count, int32_t head,
                const std::vector<int32_t>& dropped);
};

struct Text {
    static constexpr int32_t T = 23;
    Dice dice{5};
    Numbers q = dice.reals(T * HEADS * D), k = dice.reals(T * G * D), v = dice.reals(T * G * D);
};

Numbers Cache::run(pst_pool* pool, const Text& text, int32_t first, int32_t count, int32_t head,
                   const std::vector<int32_t>& dropped) {
    const pst_register* r = program.registers.data();
    std::vector<int32_t> ids(size_t(count), 0), positions;
    for (int32_t t = 0; t < count; t++) {
        positions.push_back(first + t);
        auto copy = [&](int32_t to, const Numbers& from, int32_t heads, int32_t begin) {
            std::memcpy(r[to].data + t * r[to].stride, from.data() + ((first + t) * heads + begin) * D,
                        size_t(r[to].width) * 4);
        };
        copy(q, text.q, HEADS, head * PER), copy(k, text.k, G, head), copy(v, text.v, G, head);
    }
    const int32_t *tables[] = {table.data()}, *gone[] = {dropped.data()};
    int32_t shared = 1, stride = blocks, loc[] = {0, count};
    pst_group group{lines, S, tables, &shared, &stride, dropped.empty() ? nullptr : gone, nullptr};
    pst_step step{count, 1, 0, 1, ids.data(), positions.data(), loc, loc, &group, nullptr, nullptr};
    EXPECT(program.run(pool, step) == 0, "it runs");
    return program.rows(out, count);
}

// Every head of a cache with lanes, and of one without, against a cache of its own.
void lanes(pst_pool* pool, const Text& text) {
    for (int32_t lines : {1, G}) {
        Cache both(G, lines, Text::T, false), first(1, 1, Text::T, false), second(1, 1, Text::T, false);
        for (int32_t t = 0; t < Text::T; t += MAX_TOKENS) {
            int32_t count = t + MAX_TOKENS < Text::T ? MAX_TOKENS : Text::T - t;
            Numbers got = both.run(pool, text, t, count, 0, {}), a = first.run(pool, text, t, count, 0, {});
            Numbers b = second.run(pool, text, t, count, 1, {}), want;
            for (size_t i = 0, n = PER * D; i < size_t(count); i++) {
                want.insert(want.end(), a.begin() + int64_t(i * n), a.begin() + int64_t((i + 1) * n));
                want.insert(want.end(), b.begin() + int64_t(i * n), b.begin() + int64_t((i + 1) * n));
            }
            EXPECT(same(got, want), "%d lines, token %d", lines, t);
        }
    }
}

// Line 1 forgets all that line 0 keeps: the heads go on in caches that never had more.
void forgotten(pst_pool* pool, const Text& text) {
    constexpr int32_t FIRST = 9;
    Cache both(G, G, Text::T, false), first(1, 1, Text::T, false), second(1, 1, Text::T - FIRST, false);
    for (int32_t t = 0; t < FIRST; t++) both.run(pool, text, t, 1, 0, {}), first.run(pool, text, t, 1, 0, {});
    for (int32_t t = FIRST; t < Text::T; t++) {
        Numbers got = both.run(pool, text, t, 1, 0, {0, FIRST}), want = first.run(pool, text, t, 1, 0, {});
        Numbers b = second.run(pool, text, t, 1, 1, {FIRST});
        want.insert(want.end(), b.begin(), b.end());
        EXPECT(same(got, want), "token %d", t);
    }
}

// Two pages, the best and the last, of what is already long: as many numbers as a cache of two pages gives.
void chosen(pst_pool* pool, const Text& text) {
    for (int32_t lines : {1, G}) {
        Cache cache(G, lines, Text::T, true), whole(G, lines, Text::T, false);
        for (int32_t t = 0; t < Text::T; t++) {
            Numbers got = cache.run(pool, text, t, 1, 0, {}), all = whole.run(pool, text, t, 1, 0, {});
            EXPECT(same(got, all) == (t < 2 * S), "token %d reads two pages", t);
            for (float x : got) EXPECT(std::isfinite(x), "token %d reads what was written", t);
        }
    }
}

}  // namespace

void test_lines() {
    Text text;
    for (int threads = 1; threads <= THREADS; threads++) {
        pst_pool* pool = pst_pool_new(threads, 5, 0);
        lanes(pool, text);
        forgotten(pool, text);
        chosen(pool, text);
        pst_pool_free(pool);
    }
}
