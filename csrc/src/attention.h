// Softmax attention: what its parts share.
//
// The law that every bit follows from. Keys stand in chunks of 256 and spans of 16 chunks (of 2 where keys have two
// planes), cut at absolute positions. A row (one query head of one token) goes through the chunks of a span in order:
//
//   s_j = scale q.k_j        one chain over the components, then soft cap and slope; keys of 8 bits: the chain is over
//                            their whole numbers, and `scale` is times the key's own; keys of two planes: a chain, and
//                            a scale, for each, then their sum
//   m'  = max(m, s_j)        over the keys of the chunk that the row sees
//   l   = l e^(m - m') + e^(s_j - m')            lane j mod 16, one chain per lane; in pairs lane j / 2 mod 16
//   o   = o e^(m - m') + sum of e^(s_j - m') v_j one chain per component, keys in order; of values of 8 bits the
//                            weight is times the value's scale
//
// and the spans' (m, l, o) are combined in order. What a row does not see is skipped, or weighs an exact zero of keys
// and values that are not looked at: so only the row's own position decides about its bits, not who computes it, with
// which rows beside it, or where pages lie.
#pragma once

#include "cache.h"
#include "simd.h"

namespace pst {

constexpr int CHUNK = 256;
constexpr int SPAN = 16 * CHUNK;
constexpr int NARROW_SPAN = 2 * CHUNK;  // where all query heads share one kv head: more tasks at one token
constexpr int TILE = LANES;         // keys side by side in a vector
constexpr int STRIP = 64;           // keys that few rows take at a time
constexpr int ROW_GROUP = 8;        // rows whose scores of a chunk exist at once
constexpr int STRIP_ROWS = 32;      // the same, of keys of two planes, where a chunk is not made ready as a whole
constexpr int BLOCK_ROWS = 128;     // rows that share a chunk made ready
constexpr float NOTHING = -HUGE_VALF;  // the largest of no scores

// Products of bfloat16 with planes of bfloat16 or of 8 bits, which bfloat16 holds exactly: two components (of keys) or two
// keys (of values) per instruction. Queries and weights are rounded to bfloat16 for them, and e^x is short (3e-6). 2^-9 of
// a query changes a score by 2^-9 |q||k| scale at most, some 1e-2 for scores around 5; 2^-9 of a weight moves the output
// by 2^-8 max|v| at most. l is the sum of rounded weights, two neighbours a lane (where values have scales: of weights
// before they are scaled and rounded).
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Keys or values of a chunk as the inner kernels read them.
struct Side {
    pst_plane plane, scales;
    bool scaled;  // 8 bits
    bool pairs;   // bfloat16 products
    int dim = 0;  // numbers of a key or a value
    int padded;   // multiple of 16 (keys in pairs: of 32)

    Side() = default;
    Side(const pst_plane& plane, const pst_plane& scales, int dim, int multiple)
        : plane(plane), scales(scales), scaled(plane.dtype == PST_I8),
          pairs(HAS_PAIRS && (plane.dtype == PST_BF16 || scaled)), dim(dim),
          padded(int(round_up(dim, pairs ? multiple : LANES))) {}
    int row_bytes() const { return dim * item_bytes(plane.dtype); }  // as stored
    int64_t chunk_bytes() const { return CHUNK * query_bytes(); }
    int64_t query_bytes() const { return dim ? int64_t(padded) * (pairs ? 2 : 4) : 0; }  // of a key or a query, ready
    int steps() const { return padded / (pairs ? 2 : 1); }  // numbers, or pairs of them
};

// Where the keys and values of a chunk lie, as far as they are looked at: null elsewhere.
struct Places {
    const uint8_t *keys[CHUNK], *values[CHUNK], *more[CHUNK];  // `more`: the second plane of keys, where there is one
    const float *key_scales[CHUNK], *value_scales[CHUNK], *more_scales[CHUNK];  // of those that have scales
    int first, last;  // first ... last-1 are not null
    int t0, t1;       // the block's tokens that may see some of the chunk
};

// Prefetches go to the second cache. Those to the first share its few miss buffers with loads, and bring two thirds as
// many bytes per second from pages that lie apart.
constexpr int FETCH = 2;

// Fetches what the next chunk reads, a little at a time between the work on this one: a page is too short for the
// processor to see it coming, and alone the work on a chunk would leave the memory idle. Rows are those of all kv heads
// of the task, from end to end, so that the processor's own prefetching helps.
struct Ahead {
    struct List {
        const uint8_t* const* rows;
        const float* const* scales;  // null: none
        int bytes;                   // of a row
    };
    List lists[2];
    int slowness = 1;         // a pull in so many counts
    int first = 0, last = 0;  // rows of each list that are wanted
    int list = 0, at = 0, pulls = 0;
    int lines = 0, offset = 0;  // where rows are long, a step in so many of work fetches these, and `pull` nothing

    void begin(int from, int to) { first = at = from, last = to; }

    // STEPS of the inner kernels: memory that is asked for line by line keeps nobody waiting.
    void work() {
        for (int n = lines; n > 0; n--) {
            if (at >= last) {
                if (list || first >= last) return;
                list = 1, at = first;
            }
            const List& of = lists[list];
            __builtin_prefetch(of.rows[at] + offset, 0, FETCH);
            if ((offset += 64) < of.bytes) continue;
            if (of.scales) __builtin_prefetch(of.scales[at], 0, FETCH);
            offset = 0, at++;
        }
    }
    static constexpr int STEPS = 32;

    void pull(int rows) {
        if (lines) return;
        for (pulls += rows; pulls >= slowness; pulls -= slowness, at++) {
            if (at >= last) {
                if (list || first >= last) return;
                list = 1, at = first;
            }
            const List& of = lists[list];
            for (int i = 0; i < of.bytes; i += 64) __builtin_prefetch(of.rows[at] + i, 0, FETCH);
            if (of.scales) __builtin_prefetch(of.scales[at], 0, FETCH);
        }
    }
};

// ---- attention_gather.cpp: from planes to chunks ----

// A chunk of one kv head, ready.
struct Chunk {
    const uint8_t *keys, *values, *more;
    const float *factors, *more_factors;  // of the scores: [CHUNK]
    const float* value_scales;            // [CHUNK], or null
};

// Keys become tiles [16][steps][16] of floats, or of pairs of bfloat16, steps being padded (/ 2). Whole tiles are
// filled: zeros where no key lies. Keys first ... last-1 of `keys`: those of Places, or where they were rotated to.
void gather_keys(const Side& side, const uint8_t* const* keys, int first, int last, Ahead& ahead, uint8_t* out);
// Values become [256][padded] floats, or [128][padded][2] bfloat16.
void gather_values(const Side& side, const uint8_t* const* values, int first, int last, Ahead& ahead, uint8_t* out);
// What scores are multiplied by, and values' weights: `by` times each scale, zeros where nothing lies in whole tiles.
// Without scales it is `by`.
void gather_scales(const Side& side, const Places& places, const float* const* scales, float by, float* out);
// Queries become `padded` floats or bfloat16 of keys' side.
void gather_query(const Side& side, const float* query, uint8_t* out);

// Raw keys of the chunk that begins at position `start` become rotated rows [CHUNK][rule.keys.padded] of float32, and
// `rows` their addresses, null where none lies in whole tiles.
struct Rule;
void turn_keys(const Rule& rule, const Places& places, int start, float* out, const uint8_t** rows);

// ---- attention_rows.cpp: rows against a chunk ----

// Where rows have got to. One of a span: m, and in `sums` 16 lanes of l, then o.
struct State {
    float* m;
    float* sums;
    int stride;  // of sums

    static int row_floats(int width_padded) { return LANES + width_padded; }
    static int64_t bytes(int rows, int width_padded) {
        return aligned(int64_t(rows) * 4) + aligned(int64_t(rows) * row_floats(width_padded) * 4);
    }
    State(float* m, float* sums, int stride) : m(m), sums(sums), stride(stride) {}
    State(uint8_t* memory, int rows, int width_padded)
        : m(reinterpret_cast<float*>(memory)), sums(reinterpret_cast<float*>(memory + aligned(int64_t(rows) * 4))),
          stride(row_floats(width_padded)) {}
    float* row(int r) const { return sums + int64_t(r) * stride; }
    // The states behind the first `rows`.
    State from(int rows) const { return State(m + rows, row(rows), stride); }
    void clear(int first, int last) const;
    // Row `r` of a later span onto this one. Onto nothing (`fresh`) it is a copy.
    void fold(const State& part, int r, bool fresh) const;
};

// How a layer scores, and what it reads.
struct Rule {
    Side keys, values;
    Side more;              // keys' numbers behind these, from a second plane; of none `dim` is 0
    Side stored;            // keys in their plane; `keys` are the same, or float32 if they are rotated when read
    pst_rotation rotation;  // of those; its table is null if there are none
    float scale, soft_cap;
    int window, chunk;
    int span;  // keys of a span
    float step = 1.0f;  // how far keys that lie beside each other are apart

    // The earliest position that the token at `position` sees.
    int first_key(int position) const {
        int first = window ? std::max(0, position + 1 - window) : 0;
        return chunk ? std::max(first, position / chunk * chunk) : first;
    }
};

// ---- attention_places.cpp: what tokens see, and where it lies ----

// Tokens of one sequence, neighbours in the step.
//
// The nodes of a tree (pst_step.mask) share keys before `base`, the step's first of their sequence. Behind it each has
// a path of its own, whose keys are gathered to their positions wherever their slots are: so the node goes through the
// same numbers in the same order as if its path were all there is.
struct Block {
    int32_t sequence, first, count;
    int32_t position, end;  // the earliest position of a token, and one behind the latest
    int32_t reach;          // the earliest position that a token sees
    int32_t base;           // keys from here on are no token's, or (a tree) some tokens' only
    int32_t index;          // of the first token among its sequence's in this step
    int32_t row = 0;        // of the output, of the first token; the others' follow
    int32_t span;           // keys of a span
    bool split;
    bool picks;  // what pages its one token reads
    bool blind = false;    // its tokens see nothing of what is here
    bool bundled = false;  // it goes with others that begin with the same keys
    int32_t common = 0;    // of those: tokens that it has in common with the one before it
    const int32_t* positions;  // [count]
    const uint64_t* mask;      // [count], or null: no token of this block is a node of a tree
    int32_t shift = 0;         // how far slots, which all else here is by, are behind positions
    // Of tokens that are shared out over ranks, or null: the last of those here that a token sees (-1: none), and the first.
    // All else here is by these.
    const int32_t *lasts = nullptr, *firsts = nullptr;  // [count]

    Block(const pst_step& step, const Rule& rule, int sequence, int first, int count);
    // The block where so many tokens are forgotten: not of a tree.
    Block behind(const Rule& rule, int dropped) const;
    // The block by the tokens that are here.
    void share(const int32_t* last, const int32_t* first);
    int at(int token) const { return lasts ? lasts[token] : positions[token] - shift; }
    int first_key(const Rule& rule, int token) const { return firsts ? firsts[token] : rule.first_key(at(token)); }
    int first_span() const { return reach / span; }
    int spans() const { return (end - 1) / span + 1 - first_span(); }
    // For one kv head.
    int64_t work() const { return int64_t(end - reach) * count; }
    // Whether a token sees any of keys first ... last-1.
    bool sees(const Rule& rule, int token, int first, int last) const {
        return at(token) >= first && first_key(rule, token) < last;
    }
    // Tokens that see any of them: from t0 on, before the result. Of a tree all.
    int active(const Rule& rule, int first, int last, int& t0) const;
};

// What all of the block's tokens may see of the chunk that begins at `start`. Pages of other keys are not looked up.
void find(const Rule& rule, const Pages& pages, const Block& block, int head, int start, Places& places);
// Slots p ... end-1 of the chunk that begins at `start`, and nothing for its others.
void find_slots(const Rule& rule, const Pages& pages, int head, int start, int p, int end, Places& places);

// The same with one node's own path: its tokens that stand in the chunk, if any do. `places` is of find; first ... last-1
// are then what differs from the node before, in whole tiles.
void find_path(const Rule& rule, const Pages& pages, const Block& block, int token, int head, int start, int shared,
               Places& places);

// A row against a chunk: it sees keys first ... last-1 of it, at least one.
struct Reach {
    int first, last;
    float slope;    // 0: none
    float distance; // of the chunk's key 0, in tokens
};

// A chunk that only one call of attend_rows looks at: of `Chunk` no more than scales is ready, keys and values are made
// ready a strip at a time, in memory that stays in the nearest caches: a chunk of long keys, its values and what comes
// next would not even stay in the second one.
struct Strips {
    const Places* places = nullptr;  // null: all is ready
    const uint8_t* const* keys;      // as for gather_keys
    uint8_t* memory;                 // STRIP keys, then as many values
    uint8_t* more;                   // as many keys of a second plane
    bool fresh;                      // nobody has fetched it
};

// `count` rows (at most ROW_GROUP; in strips of keys of two planes STRIP_ROWS), whose queries lie `query_bytes` apart,
// against a chunk; their states are rows `row` ... of `state`. `scratch` is of scores_bytes(count).
void attend_rows(const Rule& rule, int count, const uint8_t* queries, int64_t query_bytes, const Reach* reaches,
                 const Strips& strips, const Chunk& chunk, const State& state, int row, float* scratch, Ahead& ahead);
constexpr int64_t scores_bytes(int rows) { return int64_t(rows) * (CHUNK + LANES) * 4; }

// q.k times the keys' factors: `count` rows [CHUNK] of tiles first ... last-1 of a chunk made ready. A chain each, over
// the components in order.
void score_keys(const Side& side, int count, const uint8_t* queries, int64_t query_bytes, const uint8_t* keys,
                const float* factors, int first, int last, float* scores);

// The output of a row [width] of its state. `sink`: null, or the score of a key without a value.
void finish(const Rule& rule, const State& state, int row, const float* sink, float* out);

}  // namespace pst
