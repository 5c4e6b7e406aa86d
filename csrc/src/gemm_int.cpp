// Products with 8-bit and 4-bit weights: one loop, told what a line of weights and a row are (docs/design/0007).
//
// Weights are turned in registers even for many rows: with 6 rows the work hides under the products, and a panel stays
// 2 to 8 times smaller in the cache than one that is turned ahead.
#include <type_traits>
#include <utility>

#include "int_lanes.h"
#include "int_rows.h"
#include "kernels.h"

namespace pst {

namespace {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;  // 24 of 32 registers for the sums of 6 x 64 outputs
constexpr int vectors_at_once(int) { return 4; }
#else
constexpr int TILE_ROWS = 4;  // vectors are two registers of 16
constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
constexpr int LINE = 64;            // bytes of weights of 16 outputs
constexpr int PANEL_LINE = 4 * LINE;

// ---- weights: INPUTS in a line; groups that share a scale; lines of a group; scales of 16 outputs

struct W8 {
    static constexpr int INPUTS = 4;
    static constexpr int32_t OFFSET = OFFSET8;
    static int64_t groups(const Panel&) { return 1; }
    static int64_t lines(const Panel& p) { return (p.cols + 3) / 4; }
    static F scale(const Panel& p, int64_t, int output) {
        return load(reinterpret_cast<const float*>(p.scales) + output);
    }
};

struct W4 {
    static constexpr int INPUTS = 8;
    static constexpr int32_t OFFSET = OFFSET4;
    static int64_t groups(const Panel& p) { return (p.cols + p.group - 1) / p.group; }
    static int64_t lines(const Panel& p) { return p.group / 8; }
    static F scale(const Panel& p, int64_t group, int output) {
        return load_f16(reinterpret_cast<const uint16_t*>(p.scales) + group * PANEL + output);
    }
};

// Bit at which input J of 8 begins in a lane: low nibbles are the first four.
constexpr int nibble_bit(int j) { return 8 * (j % 4) + 4 * (j / 4); }

// ---- rows: STEP inputs meet STEP inputs of a line's outputs at a time, into a sum per output

struct X8 {
    static constexpr int STEP = 4, BYTES = 1;
    static constexpr bool SCALED = true;
    using Sum = I;
    static Sum begin(const Rows& rows, int row, int64_t group, int32_t offset) {
        // Offset times the sum of the values is what the dot products have too much. All modulo 2^32.
        return every(int32_t(0u - uint32_t(offset) * uint32_t(rows.sums[int64_t(row) * rows.groups + group])));
    }
    static I inputs(const uint8_t* x) {
        int32_t four;
        std::memcpy(&four, x, 4);
        return every(four);
    }
    template <int> static I weights(W8, I line) { return weights8(line); }
    template <int PART> static I weights(W4, I line) { return low_nibbles<4 * PART>(line); }
    static void add(W8, I& sum, I w, I x) { dot8(sum, w, x); }
    static void add(W4, I& sum, I w, I x) { dot4(sum, w, x); }
    static F value(I sum) { return to_float(sum); }
};

struct XF32 {
    static constexpr int STEP = 1, BYTES = 4;
    static constexpr bool SCALED = false;
    using Sum = F;
    static Sum begin(const Rows&, int, int64_t, int32_t) { return all(0.0f); }
    static F inputs(const uint8_t* x) { return all(*reinterpret_cast<const float*>(x)); }
    template <int PART> static F weights(W8, I line) { return byte_value<PART>(line); }
    template <int PART> static F weights(W4, I line) { return nibble_value<nibble_bit(PART)>(line); }
    template <class W> static void add(W, F& sum, F w, F x) { add_product(sum, w, x); }
    static F value(F sum) { return sum; }
};

#if defined(__AVX512BF16__)
struct XBF16 {
    static constexpr int STEP = 2, BYTES = 2;
    static constexpr bool SCALED = false;
    using Sum = F;
    static Sum begin(const Rows&, int, int64_t, int32_t) { return all(0.0f); }
    static I inputs(const uint8_t* x) { return X8::inputs(x); }
    template <int PART> static I weights(W8, I line) { return byte_pair<PART>(line); }
    template <int PART> static I weights(W4, I line) { return nibble_pair<PART>(line); }
    template <class W> static void add(W, F& sum, I w, I x) { dot_bf16(sum, w, x); }
    static F value(F sum) { return sum; }
};
#endif

// ---- the loop

// Part PART of a line: STEP inputs, into the sums of R rows x C vectors.
template <class W, class X, int PART, int R, int C>
inline __attribute__((always_inline)) void add_part(typename X::Sum (&sum)[R][C], const uint8_t* line,
                                                    const uint8_t* const (&x)[R], int64_t at) {
    decltype(X::template weights<PART>(W{}, I{})) w[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) w[c] = X::template weights<PART>(W{}, load_line(line + c * LINE));
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        auto in = X::inputs(x[r] + at + PART * X::STEP * X::BYTES);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) X::add(W{}, sum[r][c], w[c], in);
    }
}

template <class W, class X, int R, int C, int... PARTS>
inline __attribute__((always_inline)) void add_line(typename X::Sum (&sum)[R][C], const uint8_t* line,
                                                    const uint8_t* const (&x)[R], int64_t at,
                                                    std::integer_sequence<int, PARTS...>) {
    (add_part<W, X, PARTS, R, C>(sum, line, x, at), ...);
}

// A group's sums, times its scales, onto the tile.
template <class W, class X, int R, int C>
inline __attribute__((always_inline)) void add_group(const typename X::Sum (&sum)[R][C], const Panel& panel,
                                                     int64_t group, int output, float* tile) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        F scale = W::scale(panel, group, output + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            float* to = tile + r * PANEL + output + c * LANES;
            store(to, fma(X::value(sum[r][c]), scale, group ? load(to) : all(0.0f)));
        }
    }
}

// The same onto totals in registers: a tile costs each sum a load and a store, more than its multiply-add.
template <class W, class X, int R, int C>
inline __attribute__((always_inline)) void add_group(const typename X::Sum (&sum)[R][C], const Panel& panel,
                                                     int64_t group, int output, F (&total)[R][C]) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        F scale = W::scale(panel, group, output + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) total[r][c] = fma(X::value(sum[r][c]), scale, total[r][c]);
    }
}

// What a row's s8 values stand for, onto its finished sums.
template <int R, int C>
inline void scale_rows(const Rows& rows, int first, int output, float* tile) {
    for (int r = 0; r < R; r++) {
        const F scale = all(rows.scale[first + r]);
        for (float* to = tile + r * PANEL + output; to < tile + r * PANEL + output + C * LANES; to += LANES)
            store(to, load(to) * scale);
    }
}

}  // namespace
}  // namespace pst

#include "int_avx2.h"

namespace pst {
namespace {

// R rows times outputs `output` ... of a panel, C vectors of them. HOLD: totals stay in registers from group to group.
template <class W, class X, int R, int C, bool HOLD = false>
void multiply(const Rows& rows, int first, const Panel& panel, int output, float* tile) {
    constexpr auto PARTS = std::make_integer_sequence<int, W::INPUTS / X::STEP>();
    const uint8_t* x[R];
    for (int r = 0; r < R; r++) x[r] = rows.data + (first + r) * rows.stride;
    const uint8_t* line = panel.data + output * 4;
    const int64_t groups = W::groups(panel), lines = W::lines(panel);
    const int64_t ahead = STREAM_AHEAD;
    int64_t at = 0;  // bytes into the rows
    F total[R][C];
    if constexpr (HOLD) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) total[r][c] = all(0.0f);
    }
    for (int64_t g = 0; g < groups; g++) {
        typename X::Sum sum[R][C];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            auto begin = X::begin(rows, first + r, g, W::OFFSET);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[r][c] = begin;
        }
        for (int64_t l = 0; l < lines; l++) {
            if (R <= 2 && ahead)
                for (int c = 0; c < C; c++) __builtin_prefetch(line + ahead + c * LINE);
            add_line<W, X, R, C>(sum, line, x, at, PARTS);
            line += PANEL_LINE;
            at += W::INPUTS * X::BYTES;
        }
        if constexpr (HOLD) add_group<W, X, R, C>(sum, panel, g, output, total);
        else add_group<W, X, R, C>(sum, panel, g, output, tile);
    }
    if constexpr (HOLD) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) store(tile + r * PANEL + output + c * LANES, total[r][c]);
    }
    if (X::SCALED) scale_rows<R, C>(rows, first, output, tile);
}

template <class W, class X, int R>
void tile_of(const Rows& rows, int first, const Panel& panel, float* tile) {
    constexpr int C = vectors_at_once(R);
    auto* part = multiply<W, X, R, C>;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (std::is_same_v<W, W4> && std::is_same_v<X, X8>) part = multiply_nibbles<R, C>;
#endif
    for (int output = 0; output < PANEL; output += C * LANES) part(rows, first, panel, output, tile);
}

template <class W, class X, int... R>
void choose(const Rows& rows, int first, int count, const Panel& panel, float* tile, std::integer_sequence<int, R...>) {
    using Tile = void (*)(const Rows&, int, const Panel&, float*);
    static constexpr Tile tiles[] = {tile_of<W, X, R + 1>...};
    tiles[count - 1](rows, first, panel, tile);
}

// Whether rows behind the first ones hold their totals. Half the rows read the panel twice as often: from the second
// level cache that costs little, but whoever fetches the panel from memory had better be six. Bits are the same.
#if defined(__AVX512VNNI__)
template <class W, class X> constexpr bool HOLDS = std::is_same_v<W, W4> && std::is_same_v<X, X8>;
#else
template <class W, class X> constexpr bool HOLDS = false;
#endif
constexpr int HELD_ROWS = 3;  // 12 registers for the sums of a group, 12 for the totals

template <class W, class X>
void hold(const Rows& rows, int first, int count, const Panel& panel, float* tile) {
    using Tile = void (*)(const Rows&, int, const Panel&, int, float*);
    static constexpr Tile tiles[] = {multiply<W, X, 1, 4, true>, multiply<W, X, 2, 4, true>,
                                     multiply<W, X, HELD_ROWS, 4, true>};
    for (int r = 0; r < count; r += HELD_ROWS)
        tiles[(count - r < HELD_ROWS ? count - r : HELD_ROWS) - 1](rows, first + r, panel, 0, tile + r * PANEL);
}

template <class W, class X>
void kernel(const Rows& rows, int first, int count, const Panel& panel, float* tile) {
    if (count > TILE_ROWS) {  // of a product whose `many` takes more
        kernel<W, X>(rows, first, TILE_ROWS, panel, tile);
        return kernel<W, X>(rows, first + TILE_ROWS, count - TILE_ROWS, panel, tile + TILE_ROWS * PANEL);
    }
    if constexpr (HOLDS<W, X>) {
        if (first >= TILE_ROWS) return hold<W, X>(rows, first, count, panel, tile);
    }
    choose<W, X>(rows, first, count, panel, tile, std::make_integer_sequence<int, TILE_ROWS>());
}

// ---- what the interpreter finds

template <class X> int64_t row_bytes(int cols, int group) {
    return (padded_inputs(cols, group) * X::BYTES + 63) / 64 * 64;
}
int32_t row_groups(int cols, int group) { return group ? (cols + group - 1) / group : 1; }
int32_t no_groups(int, int) { return 0; }

template <class W, class X>
constexpr Product product(int32_t format, int32_t act, Prepare prepare) {
    return {format,  act,          TILE_ROWS, row_bytes<X>, X::SCALED ? row_groups : no_groups,
            prepare, kernel<W, X>, nullptr,   nullptr,      nullptr,
            0};
}

constexpr Product PRODUCTS[] = {
#if defined(__AVX2__) && !defined(__AVX512F__)
    {PST_M_I8, PST_A_I8, WIDE_ROWS, row_bytes<X8>, row_groups, prepare_s8, kernel<W8, X8>, pairs_bytes, unpack_pairs,
     many_pairs, 2 * WIDE_ROWS},
#else
    product<W8, X8>(PST_M_I8, PST_A_I8, prepare_s8),
#endif
    product<W4, X8>(PST_M_I4, PST_A_I8, prepare_s8),
    product<W8, XF32>(PST_M_I8, PST_A_F32, prepare_f32),
    product<W4, XF32>(PST_M_I4, PST_A_F32, prepare_f32),
#if defined(__AVX512BF16__)
    product<W8, XBF16>(PST_M_I8, PST_A_BF16, prepare_bf16),
    product<W4, XBF16>(PST_M_I4, PST_A_BF16, prepare_bf16),
#else
    product<W8, XF32>(PST_M_I8, PST_A_BF16, prepare_rounded),
    product<W4, XF32>(PST_M_I4, PST_A_BF16, prepare_rounded),
#endif
};

}  // namespace

const Product* int_product(int32_t format, int32_t act) {
    for (const Product& p : PRODUCTS)
        if (p.format == format && p.act == act) return &p;
    return nullptr;
}

}  // namespace pst
