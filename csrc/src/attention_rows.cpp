// Rows against a chunk of keys and values: scores, weights, weighted values.
#include "attention.h"
#include "attention_math.h"

namespace pst {

namespace {

// Rows and vectors that a kernel keeps in registers. They change no bit: every number has its own chain.
#if defined(__AVX512F__)
constexpr int SCORE_ROWS = 8, SCORE_TILES = 2, VALUE_ROWS = 4, VALUE_VECTORS = 4;
#else
constexpr int SCORE_ROWS = 4, SCORE_TILES = 1, VALUE_ROWS = 2, VALUE_VECTORS = 2;
#endif
#ifndef NT
#define NT 4
#endif
#ifndef NS
#define NS 64
#endif
constexpr int NEAR_TILES = NT, NEAR_STEPS = NS;  // of keys and values, which many rows meet one after the other

// ---- scores ----

struct Products {
    const uint8_t* queries;
    int64_t query_bytes;
    const uint8_t* keys;
    int steps;    // numbers, or pairs of them, of a query
    const float* factors;
    Ahead& ahead;
    bool onto = false;  // what is in `scores`
};

#if defined(__AVX512BF16__)
inline __m512bh pair_for_all(const void* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}
#endif

template <bool PAIRS>
inline F step(const uint8_t* query, int d, F keys, F sum) {
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) return {_mm512_dpbf16_ps(sum.v, pair_for_all(query + 4 * d), (__m512bh)keys.v)};
#endif
    return fma(all(reinterpret_cast<const float*>(query)[d]), keys, sum);
}

inline void put(const Products& p, F x, float* scores) { store(scores, p.onto ? load(scores) + x : x); }

// q.k times the key's factor, of ROWS rows and TILES tiles of keys.
template <bool PAIRS, int ROWS, int TILES>
void score_block(const Products& p, int row, int tile, float* scores) {
    F sums[ROWS][TILES];
#pragma GCC unroll 16
    for (auto& of_row : sums)
#pragma GCC unroll 16
        for (F& sum : of_row) sum = all(0.0f);
    const float* keys = reinterpret_cast<const float*>(p.keys) + int64_t(tile) * p.steps * TILE;
    const uint8_t* query = p.queries + row * p.query_bytes;
    auto steps = [&](int d, int end) __attribute__((always_inline)) {
        for (; d < end; d++, keys += TILE) {
            F k[TILES];
#pragma GCC unroll 16
            for (int i = 0; i < TILES; i++) k[i] = load(keys + int64_t(i) * p.steps * TILE);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
                for (int i = 0; i < TILES; i++) sums[r][i] = step<PAIRS>(query + r * p.query_bytes, d, k[i], sums[r][i]);
        }
    };
    if (!p.ahead.lines) {
        steps(0, p.steps);
    } else {
        for (int from = 0; from < p.steps; from += Ahead::STEPS) {
            p.ahead.work();
            steps(from, std::min(p.steps, from + Ahead::STEPS));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int i = 0; i < TILES; i++)
            put(p, sums[r][i] * load(p.factors + (tile + i) * TILE), scores + int64_t(row + r) * CHUNK + (tile + i) * TILE);
}

template <bool PAIRS, int ROWS>
void score_rows(const Products& p, int row, int first, int last, float* scores) {
    constexpr int WIDE = ROWS * 2 <= SCORE_ROWS ? 2 * SCORE_TILES : SCORE_TILES;
    int tile = first;
    for (; tile + WIDE <= last; tile += WIDE) {
        p.ahead.pull(8 * WIDE);
        score_block<PAIRS, ROWS, WIDE>(p, row, tile, scores);
    }
    for (; tile < last; tile++) score_block<PAIRS, ROWS, 1>(p, row, tile, scores);
}

template <bool PAIRS>
void score(const Products& p, int count, int first, int last, float* scores) {
    // Many rows meet a few tiles at a time, which stay in the nearest cache.
    const int tiles = count > SCORE_ROWS ? NEAR_TILES : last - first;
    for (int from = first, to; from < last; from = to) {
        to = std::min(last, from + tiles);
        for (int row = 0, rows; row < count; row += rows) {
            rows = std::min(count - row, SCORE_ROWS);
            switch (rows) {
                case 1: score_rows<PAIRS, 1>(p, row, from, to, scores); break;
                case 2: score_rows<PAIRS, 2>(p, row, from, to, scores); break;
                case 3: score_rows<PAIRS, 3>(p, row, from, to, scores); break;
                case 4: score_rows<PAIRS, 4>(p, row, from, to, scores); break;
#if defined(__AVX512F__)
                case 5: score_rows<PAIRS, 5>(p, row, from, to, scores); break;
                case 6: score_rows<PAIRS, 6>(p, row, from, to, scores); break;
                case 7: score_rows<PAIRS, 7>(p, row, from, to, scores); break;
                case 8: score_rows<PAIRS, 8>(p, row, from, to, scores); break;
#endif
            }
        }
    }
}

// ---- weights ----

// e^(s - level) of scores from ... to-1, whole tiles, in their place or (PAIRS) as bfloat16 in the row's first half;
// SCALED: times the scales. Returns `total` plus the weights, lane by lane.
template <bool SCALED>
F weights(float* scores, const float* scales, int from, int to, float level, F total) {
    for (int at = from; at < to; at += TILE) {
        F weight = exp(load(scores + at) - all(level));
        total = total + weight;
        store(scores + at, SCALED ? weight * load(scales + at) : weight);
    }
    return total;
}

#if defined(__AVX512BF16__)
// e^x for x <= 0 within 3e-6 and |x| 2^-23, which is enough for a weight of bfloat16. 1 at 0, NaN stays NaN.
inline F short_exp(F x) {
    x = max(all(-200.0f), x * all(1.44269504f));
    F n = round(x), r = x - n;
    F p = fma(all(9.582852580e-3f), r, all(5.590642847e-2f));
    p = fma(p, r, all(2.402409865e-1f));
    p = fma(p, r, all(6.931241929e-1f));
    return scale2(fma(p, r, all(1.0f)), n);
}

template <bool SCALED>
F weights_in_pairs(float* scores, const float* scales, int from, int to, float level, F total) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    // Weight j stands in half j: at or before the scores that are read already.
    for (int at = from; at < to; at += 2 * TILE) {
        bool both = at + TILE < to;
        F low = short_exp(load(scores + at) - all(level)), high = all(0.0f);
        if (both) high = short_exp(load(scores + at + TILE) - all(level));
        if constexpr (SCALED) {
            total = total + low + high;
            low = low * load(scales + at);
            if (both) high = high * load(scales + at + TILE);
        }
        __m512bh narrow = _mm512_cvtne2ps_pbh(high.v, low.v);
        if constexpr (!SCALED) total = {_mm512_dpbf16_ps(total.v, narrow, ones)};
        if (both) _mm512_storeu_si512(scores + at / 2, (__m512i)narrow);
        else _mm256_storeu_si256(reinterpret_cast<__m256i*>(scores + at / 2), _mm512_castsi512_si256((__m512i)narrow));
    }
    return total;
}
#endif

void bend(const Rule& rule, const Reach& reach, int from, int to, float* scores) {
    if (rule.soft_cap != 0.0f)
        for (int at = from; at < to; at += TILE) store(scores + at, soft_cap(load(scores + at), rule.soft_cap));
    if (reach.slope == 0.0f) return;
    alignas(64) static const float numbers[TILE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F slope = all(reach.slope), lanes = load(numbers) * all(rule.step);
    for (int at = from; at < to; at += TILE)
        store(scores + at, load(scores + at) - slope * (all(reach.distance - float(at) * rule.step) - lanes));
}

// A row's scores become weights against its new maximum, to which its state is brought. SCALED: times the scales.
template <bool PAIRS, bool SCALED>
void weigh(const Rule& rule, const Reach& reach, const float* scales, float* scores, float& m, float* sums) {
    int from = reach.first / TILE * TILE, to = int(round_up(reach.last, TILE));
    bend(rule, reach, from, to, scores);
    // Whatever stands in the memory of keys that the row does not see ends here.
    for (int j = from; j < reach.first; j++) scores[j] = NOTHING;
    for (int j = reach.last; j < to; j++) scores[j] = NOTHING;
    F best = load(scores + from);
    for (int at = from + TILE; at < to; at += TILE) best = max(best, load(scores + at));
    float now = top(best);
    now = now > m ? now : m;
    // With nothing but -infinity so far every weight is 0; -infinity minus itself would be NaN.
    float level = now == NOTHING ? 0.0f : now;
    if (now != m) {
        F shrink = exp(all(m - level));
        for (int i = 0; i < LANES + rule.values.padded; i += LANES) store(sums + i, load(sums + i) * shrink);
    }
    m = now;
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) store(sums, weights_in_pairs<SCALED>(scores, scales, from, to, level, load(sums)));
    else
#endif
        store(sums, weights<SCALED>(scores, scales, from, to, level, load(sums)));
    if constexpr (PAIRS && SCALED) {
        // The scale of what the row does not see may be NaN, and zero times that is no zero.
        auto* halves = reinterpret_cast<uint16_t*>(scores);
        for (int j = from; j < reach.first; j++) halves[j] = 0;
        for (int j = reach.last; j < to; j++) halves[j] = 0;
    }
}

// ---- weighted values ----

// What of a pair of keys counts.
enum Part { BOTH, EARLIER, LATER };

struct Weighing {
    const float* weights;  // [rows][CHUNK]: floats, or pairs of bfloat16
    const float* values;   // [..][padded] of floats or pairs
    int padded;
    float* out;
    int stride;  // of out
    Part part;
    Ahead& ahead;
};

template <bool PAIRS>
inline F value_step(const float* weight, F value, F sum) {
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) return {_mm512_dpbf16_ps(sum.v, pair_for_all(weight), (__m512bh)value.v)};
#endif
    return fma(all(*weight), value, sum);
}

inline F keep(F pair, Part part) {
#if defined(__AVX512BF16__)
    if (part != BOTH) {
        __m512i mask = _mm512_set1_epi32(part == EARLIER ? 0x0000ffff : int(0xffff0000));
        return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pair.v), mask))};
    }
#else
    (void)part;
#endif
    return pair;
}

// Steps (keys, or pairs of them) first ... last-1, onto what is in `out`.
template <bool PAIRS, int ROWS, int VECTORS>
void value_block(const Weighing& w, int row, int column, int first, int last) {
    F sums[ROWS][VECTORS];
    float* out = w.out + int64_t(row) * w.stride + column;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) sums[r][i] = load(out + int64_t(r) * w.stride + i * LANES);
    const float* weights = w.weights + int64_t(row) * CHUNK;
    const float* values = w.values + int64_t(first) * w.padded + column;
    auto steps = [&](int j, int end) __attribute__((always_inline)) {
        for (; j < end; j++, values += w.padded) {
            F v[VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; i++) v[i] = load(values + i * LANES);
            if constexpr (PAIRS && ROWS == 1)
                for (F& x : v) x = keep(x, w.part);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
                for (int i = 0; i < VECTORS; i++)
                    sums[r][i] = value_step<PAIRS>(weights + r * CHUNK + j, v[i], sums[r][i]);
        }
    };
    if (!w.ahead.lines) {
        steps(first, last);
    } else {
        for (int from = first; from < last; from += Ahead::STEPS) {
            w.ahead.work();
            steps(from, std::min(last, from + Ahead::STEPS));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; i++) store(out + int64_t(r) * w.stride + i * LANES, sums[r][i]);
}

template <bool PAIRS, int ROWS>
void value_rows(const Weighing& w, int row, int first, int last) {
    int column = 0;
    for (; column + VALUE_VECTORS * LANES <= w.padded; column += VALUE_VECTORS * LANES)
        value_block<PAIRS, ROWS, VALUE_VECTORS>(w, row, column, first, last);
    for (; column < w.padded; column += LANES) value_block<PAIRS, ROWS, 1>(w, row, column, first, last);
}

// Keys first ... last-1 of one row; ends may fall between the keys of a pair.
template <bool PAIRS>
void add_alone(const Weighing& w, int row, int first, int last) {
    if (first >= last) return;
    if constexpr (!PAIRS) {
        value_rows<false, 1>(w, row, first, last);
        return;
    }
    Weighing part = w;
    auto half = [&](Part which, int pair) {
        part.part = which;
        value_rows<PAIRS, 1>(part, row, pair, pair + 1);
    };
    if (first % 2) half(LATER, first / 2);
    if (int from = (first + 1) / 2; from < last / 2) value_rows<PAIRS, 1>(w, row, from, last / 2);
    if (last % 2) half(EARLIER, last / 2);
}

// Rows' weighted values onto `out`: what all of them see in one go, what lies before and behind row by row, so that
// every row takes its keys in order and no others.
template <bool PAIRS>
void add_values(const Weighing& w, int count, const Reach* reaches) {
    constexpr int KEYS = PAIRS ? 2 : 1;
    int first = 0, last = CHUNK;
    for (int r = 0; r < count; r++) {
        first = std::max(first, reaches[r].first);
        last = std::min(last, reaches[r].last);
    }
    first = (first + KEYS - 1) / KEYS * KEYS;
    last = last / KEYS * KEYS;
    if (first >= last) {
        for (int r = 0; r < count; r++) add_alone<PAIRS>(w, r, reaches[r].first, reaches[r].last);
        return;
    }
    for (int r = 0; r < count; r++) add_alone<PAIRS>(w, r, reaches[r].first, first);
    const int begin = first / KEYS, end = last / KEYS, steps = count > ROW_GROUP ? NEAR_STEPS : end - begin;
    for (int from = begin, to; from < end; from = to) {
        to = std::min(end, from + steps);
        for (int r = 0, rows; r < count; r += rows) {
            rows = std::min(count - r, VALUE_ROWS);
            switch (rows) {
                case 1: value_rows<PAIRS, 1>(w, r, from, to); break;
                case 2: value_rows<PAIRS, 2>(w, r, from, to); break;
#if defined(__AVX512F__)
                case 3: value_rows<PAIRS, 3>(w, r, from, to); break;
                case 4: value_rows<PAIRS, 4>(w, r, from, to); break;
#endif
            }
        }
    }
    for (int r = 0; r < count; r++) add_alone<PAIRS>(w, r, last, reaches[r].last);
}

}  // namespace

void score_keys(const Side& side, int count, const uint8_t* queries, int64_t query_bytes, const uint8_t* keys,
                const float* factors, int first, int last, float* scores) {
    Ahead nothing{};
    const Products products{queries, query_bytes, keys, side.steps(), factors, nothing};
    (side.pairs ? score<HAS_PAIRS> : score<false>)(products, count, first, last, scores);
}

void State::clear(int first, int last) const {
    for (int r = first; r < last; r++) {
        m[r] = NOTHING;
        std::memset(row(r), 0, size_t(stride) * 4);
    }
}

void State::fold(const State& part, int r, bool fresh) const {
    float *own = row(r), *other = part.row(r);
    if (fresh) {
        m[r] = part.m[r];
        std::memcpy(own, other, size_t(stride) * 4);
        return;
    }
    float now = part.m[r] > m[r] ? part.m[r] : m[r], level = now == NOTHING ? 0.0f : now;
    F a = exp(all(m[r] - level)), b = exp(all(part.m[r] - level));
    for (int i = 0; i < stride; i += LANES) store(own + i, load(own + i) * a + load(other + i) * b);
    m[r] = now;
}

void attend_rows(const Rule& rule, int count, const uint8_t* queries, int64_t query_bytes, const Reach* reaches,
                 const Strips& strips, const Chunk& chunk, const State& state, int row, float* scratch, Ahead& ahead) {
    int first = CHUNK, last = 0;
    for (int r = 0; r < count; r++) {
        first = std::min(first, reaches[r].first);
        last = std::max(last, reaches[r].last);
    }
    const Side &k = rule.keys, &v = rule.values;
    const Places* places = strips.places;
    int length = places ? STRIP : CHUNK, begin = first / length * length;
    // Keys a strip ahead of their use, and meanwhile the values, which are wanted when the last score is known.
    int key_at = first, value_at = first;
    auto fetch = [&](const uint8_t* const* rows, int bytes, int& at, int end) {
        for (; at < std::min(end, last); at++)
            for (int i = 0; i < bytes; i += 64) __builtin_prefetch(rows[at] + i, 0, FETCH);
    };
    for (int from = begin; from < last; from += length) {
        int a = std::max(first - from, 0), b = std::min(last - from, length);
        if (places && strips.fresh) {
            fetch(places->keys, rule.stored.row_bytes(), key_at, from + 2 * STRIP);
            if (rule.more.dim) fetch(places->more, rule.more.row_bytes(), value_at, from + 2 * STRIP);
            else fetch(places->values, v.row_bytes(), value_at, from + STRIP);
        }
        if (places) gather_keys(k, strips.keys + from, a, b, ahead, strips.memory);
        if (places && rule.more.dim) gather_keys(rule.more, places->more + from, a, b, ahead, strips.more);
        auto scored = [&](const Side& side, const Products& products) {
            (side.pairs ? score<HAS_PAIRS> : score<false>)(products, count, a / TILE, (b + TILE - 1) / TILE, scratch + from);
        };
        scored(k, {queries, query_bytes, places ? strips.memory : chunk.keys, k.steps(), chunk.factors + from, ahead});
        if (!rule.more.dim) continue;
        const uint8_t* behind = queries + k.query_bytes();
        scored(rule.more, {behind, query_bytes, places ? strips.more : chunk.more, rule.more.steps(),
                           chunk.more_factors + from, ahead, true});
    }
    auto weighing = v.pairs ? (v.scaled ? weigh<HAS_PAIRS, true> : weigh<HAS_PAIRS, false>)
                            : (v.scaled ? weigh<false, true> : weigh<false, false>);
    for (int r = 0; r < count; r++) {
        ahead.pull(16);
        weighing(rule, reaches[r], chunk.value_scales, scratch + r * CHUNK, state.m[row + r], state.row(row + r));
    }
    for (int from = begin; from < last; from += length) {
        int a = std::max(first - from, 0), b = std::min(last - from, length);
        if (places) gather_values(v, places->values + from, a, b, ahead, strips.memory);
        Reach of_strip[STRIP_ROWS];
        for (int r = 0; places && r < count; r++) {
            of_strip[r].first = std::min(std::max(reaches[r].first - from, 0), length);
            of_strip[r].last = std::max(std::min(reaches[r].last - from, length), of_strip[r].first);
        }
        const Reach* seen = places ? of_strip : reaches;
        Weighing w{scratch + from / (v.pairs ? 2 : 1),
                   reinterpret_cast<const float*>(places ? strips.memory : chunk.values),
                   v.padded,
                   state.row(row) + LANES,
                   state.stride,
                   BOTH,
                   ahead};
        if (v.pairs) add_values<HAS_PAIRS>(w, count, seen);
        else add_values<false>(w, count, seen);
    }
}

void finish(const Rule& rule, const State& state, int r, const float* sink, float* out) {
    const float* sums = state.row(r);
    float total = sum(load(sums));
    F shrink = all(1.0f);
    if (sink) {
        float now = *sink > state.m[r] ? *sink : state.m[r], level = now == NOTHING ? 0.0f : now;
        float both[LANES], own[LANES];
        shrink = exp(all(state.m[r] - level));
        store(own, shrink);
        store(both, exp(all(*sink - level)));
        total = total * own[0] + both[0];
    }
    for (int i = 0; i < rule.values.dim; i += LANES) {
        F y = load(sums + LANES + i) * shrink / all(total);
        if (i + LANES <= rule.values.dim) store(out + i, y);
        else store(out + i, y, rule.values.dim - i);
    }
}

}  // namespace pst
