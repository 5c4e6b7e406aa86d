// The kernel of rows of 8 bits in blocks: a chunk of a panel, made ready or as it lies, and a few rows.
#pragma once

#include <type_traits>

#include "block_codes.h"
#include "block_rows.h"
#include "int_lanes.h"
#include "kernels.h"

// Without vpdpbusd, products of bytes up to 255 take twice as long as those of -127 ... 127.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#define PST_SIGNED_BYTES
#define PST_SUMS_OF_16
#endif
// Nor are there products of signed with other bytes before ARM's usdot.
#if defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define PST_SIGNED_BYTES
#if !defined(__ARM_FEATURE_DOTPROD)
#define PST_SUMS_OF_16
#endif
#endif

namespace pst {

// Vectors of outputs that so many rows meet at a time.
constexpr int vectors_of([[maybe_unused]] int rows) {
#if defined(__AVX512F__)
    return 4;  // 12 registers for the sums of 3 rows, 12 for their totals
#elif defined(__AVX2__)
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;  // a vector is two registers of 16
#elif defined(__aarch64__)
    return rows == 1 ? 2 : 1;  // four of 32; totals take as many as sums
#else
    return 1;
#endif
}
constexpr int ROWS = 3;
constexpr int HALF_ROWS = 2;  // of groups of 16, which keep a sum more

// How scales of weights lie to blocks of rows: one for all of a row; one or more blocks of 32 each; two in a block of 32; one
// for a block of 64 or 128, the only ones of several units: a loop over them costs the others registers.
enum Scales { ROW, BLOCKS, HALVES, LONG };

// A chunk of a panel, and where it lies in a row.
struct Chunk {
    const uint8_t* codes;
    const float* scales;  // [groups][64]
    const float* zeros;
    int units, block_units;
    int shift;  // 2^shift blocks share a scale
    int32_t offset;
    int64_t input, block, stretch;  // first ones of a row
    int64_t ahead;                  // bytes that codes are fetched ahead, if they are
};

struct Row {
    const int8_t* x;
    const float* scales;
    const float* totals;
    alignas(64) int32_t start[16];

    Row(const uint8_t* data, const BlockRow& row, const Chunk& chunk)
        : x(reinterpret_cast<const int8_t*>(data) + chunk.input),
          scales(reinterpret_cast<const float*>(data + row.scales_at) + chunk.block),
          totals(reinterpret_cast<const float*>(data + row.totals_at) + chunk.stretch) {
        // Offset times the sum of the values is what the dot products have too much. All modulo 2^32.
        I sums = every(0);
        if (chunk.offset) sums = load_ints(reinterpret_cast<const int32_t*>(data + row.sums_at) + chunk.stretch);
        store_line(reinterpret_cast<uint8_t*>(start), times(sums, every(-chunk.offset)));
    }
};

// What lies `ahead` of a unit, when its line L is met. Measured on a Zen 5: units of 4 bits are read 5 to 8 % faster if
// theirs is asked for little by little, larger ones as much faster if it is asked for at once.
template <class Code, int L, int C>
inline __attribute__((always_inline)) void fetch_ahead(const uint8_t* unit, int64_t ahead) {
    constexpr int LINES = Code::BYTES * C / PANEL_LINE, PARTS = Code::BYTES > 1024 ? 1 : 8;
    if constexpr (Code::FETCH && L < PARTS)
        for (int i = L * LINES / PARTS; i < (L + 1) * LINES / PARTS; i++)
            __builtin_prefetch(unit + ahead + i / C * PANEL_LINE + i % C * LINE);
}

inline I four_inputs(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return every(four);
}

// Line L of a unit into the sums of R rows x C vectors.
template <int L, class Code, int R, int C>
inline __attribute__((always_inline)) void add_line(I (&sum)[R][C], const Code& code, const uint8_t* unit,
                                                    const int8_t* const (&x)[R], int64_t at, int64_t ahead) {
    fetch_ahead<Code, L, C>(unit, ahead);
    I w[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        w[c] = code.template line<L>(unit + c * LINE);
        if (R > 1) keep(w[c]);
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) {
        const I in = four_inputs(x[r] + at + 4 * L);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
#if defined(PST_SIGNED_BYTES)
            if constexpr (std::is_same_v<Code, CodeS8>) dot_s8(sum[r][c], w[c], in);
            else
#endif
            if constexpr (Code::MOST <= 127) dot_u7(sum[r][c], w[c], in);
            else dot_u8(sum[r][c], w[c], in);
        }
    }
}

#if defined(PST_SUMS_OF_16)
// The same of nibbles, into sums of 16 bits: eight lines' products of 15 at most fit.
template <int L, class Code, int R, int C>
inline __attribute__((always_inline)) void add_line16(Sums16 (&sum)[R][C], const Code& code, const uint8_t* unit,
                                                      const int8_t* const (&x)[R], int64_t at, int64_t ahead) {
    fetch_ahead<Code, L, C>(unit, ahead);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const I w = code.template line<L>(unit + c * LINE);
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) add_dot16(sum[r][c], w, four_inputs(x[r] + at + 4 * L));
    }
}
#endif

// Lines FIRST + L.
template <int FIRST, class Code, int R, int C, int... L>
inline __attribute__((always_inline)) void add_lines(I (&sum)[R][C], const Code& code, const uint8_t* unit,
                                                     const int8_t* const (&x)[R], int64_t at, int64_t ahead,
                                                     std::integer_sequence<int, L...>) {
#if defined(PST_SUMS_OF_16)
    if constexpr (Code::MOST <= 15) {
        Sums16 half[R][C];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) half[r][c] = no_sums();
        (add_line16<FIRST + L>(half, code, unit, x, at, ahead), ...);
#pragma GCC unroll 3
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) add_pairs(sum[r][c], half[r][c]);
        return;
    }
#endif
    (add_line<FIRST + L>(sum, code, unit, x, at, ahead), ...);
}

template <bool ZEROS, int R, int C>
inline __attribute__((always_inline)) void begin(I (&sum)[R][C], const Row (&rows)[R], int64_t stretch) {
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) {
        const I start = every(ZEROS ? 0 : rows[r].start[stretch]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c] = start;
    }
}

// R rows times C vectors of outputs from `output` on, onto the tile. One chain of additions per output, whatever R, C and
// Code are: of a block its sums times their scales, then what its zeros take.
template <class Code, int R, int C, Scales SCALES, bool ZEROS>
void add_chunk(const Code& code, const Row (&rows)[R], const Chunk& chunk, int output, float* tile) {
    constexpr auto FOUR = std::make_integer_sequence<int, 4>();
    constexpr auto EIGHT = std::make_integer_sequence<int, 8>();
    F total[R][C];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) total[r][c] = load(tile + r * PANEL + output + c * LANES);
    const int8_t* x[R];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) x[r] = rows[r].x;
    const uint8_t* unit = chunk.codes + output * 4;
    const float *scales = chunk.scales + output, *zeros = chunk.zeros + output;
    const int64_t ahead = chunk.ahead;
    int64_t at = 0, block = 0;
    const uint8_t* const end = unit + chunk.units * Code::BYTES;
    for (; unit != end; block++) {
        I sum[R][C];
        if constexpr (SCALES == HALVES) {
            F part[R][C];
            begin<ZEROS>(sum, rows, 2 * block);
            add_lines<0>(sum, code, unit, x, at, ahead, FOUR);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const F scale = load(scales + c * LANES);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) part[r][c] = to_float(sum[r][c]) * scale;
            }
            begin<ZEROS>(sum, rows, 2 * block + 1);
            add_lines<4>(sum, code, unit, x, at, ahead, FOUR);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const F scale = load(scales + PANEL + c * LANES);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) {
                    part[r][c] = fma(to_float(sum[r][c]), scale, part[r][c]);
                    total[r][c] = fma(part[r][c], all(rows[r].scales[block]), total[r][c]);
                    if constexpr (ZEROS) {
                        total[r][c] = fma(load(zeros + c * LANES), all(rows[r].totals[2 * block]), total[r][c]);
                        total[r][c] = fma(load(zeros + PANEL + c * LANES), all(rows[r].totals[2 * block + 1]), total[r][c]);
                    }
                }
            }
            scales += 2 * PANEL;
            zeros += 2 * PANEL;
            unit += Code::BYTES;
            at += UNIT;
        } else {
            begin<ZEROS && SCALES != ROW>(sum, rows, block);
            for (int u = 0; u < (SCALES == LONG ? chunk.block_units : 1); u++, unit += Code::BYTES, at += UNIT) {
                if (SCALES == LONG && unit == end) break;
                add_lines<0>(sum, code, unit, x, at, ahead, EIGHT);
            }
            // Several blocks may share a scale.
            const int64_t group = block >> chunk.shift;
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) {
                    F by = all(rows[r].scales[block]);
                    if constexpr (SCALES != ROW) by = by * load(scales + group * PANEL + c * LANES);
                    total[r][c] = fma(to_float(sum[r][c]), by, total[r][c]);
                    if constexpr (ZEROS && SCALES != ROW)
                        total[r][c] = fma(load(zeros + group * PANEL + c * LANES), all(rows[r].totals[block]), total[r][c]);
                }
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(tile + r * PANEL + output + c * LANES, total[r][c]);
}

// Rows at `data` and the next R-1 meet a chunk.
template <class Code, int R, Scales SCALES, bool ZEROS>
void add_rows(const BlockShape& shape, const uint8_t* data, int64_t stride, const BlockRow& row, const Chunk& chunk, float* tile) {
    const Code code(shape);
    auto run = [&](const Row (&rows)[R]) {
        constexpr int C = vectors_of(R);
        for (int output = 0; output < PANEL; output += C * LANES)
            add_chunk<Code, R, C, SCALES, ZEROS>(code, rows, chunk, output, tile);
    };
    if constexpr (R == 1) run({Row(data, row, chunk)});
    else if constexpr (R == 2) run({Row(data, row, chunk), Row(data + stride, row, chunk)});
    else run({Row(data, row, chunk), Row(data + stride, row, chunk), Row(data + 2 * stride, row, chunk)});
}

using Add = void (*)(const BlockShape&, const uint8_t* data, int64_t stride, const BlockRow&, const Chunk&, float* tile);

// By the number of rows.
template <class Code, Scales SCALES, bool ZEROS>
constexpr Add BY_ROWS[ROWS] = {add_rows<Code, 1, SCALES, ZEROS>, add_rows<Code, 2, SCALES, ZEROS>,
                               add_rows<Code, SCALES == HALVES ? 2 : 3, SCALES, ZEROS>};

}  // namespace pst
