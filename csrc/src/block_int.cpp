// Products of rows of 8 bits in blocks with panels of PST_M_BLOCK (docs/design/0014).
#include "block_codes.h"
#include "block_rows.h"
#include "int_lanes.h"
#include "kernels.h"

namespace pst {

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // 12 registers for the sums of 3 rows, 12 for their totals
#else
constexpr int VECTORS = 1;
#endif
constexpr int ROWS = 3;
constexpr int HALF_ROWS = 2;  // of groups of 16, which keep a sum more

// How scales of weights lie to blocks of rows: one for all of a row; one or more blocks each; two in a block of 32.
enum Scales { ROW, BLOCKS, HALVES };

// A chunk of a panel made ready, and where it lies in a row.
struct Chunk {
    const uint8_t* codes;   // [units * 8][64][4]
    const float* scales;    // [groups][64]
    const float* zeros;
    int units, block_units, blocks_in_group;
    int32_t offset;
    int64_t input, block, stretch;  // first ones of a row
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
        const I sums = load_ints(reinterpret_cast<const int32_t*>(data + row.sums_at) + chunk.stretch);
        store_line(reinterpret_cast<uint8_t*>(start), times(sums, every(-chunk.offset)));
    }
};

template <bool SMALL> inline void dot(I& sum, I w, I x) {
    if constexpr (SMALL) dot_u7(sum, w, x);
    else dot_u8(sum, w, x);
}

inline I four_inputs(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return every(four);
}

// LINES lines of a unit into the sums of R rows x C vectors.
template <int R, int C, int LINES, bool SMALL>
inline __attribute__((always_inline)) void add_lines(I (&sum)[R][C], const uint8_t* codes, const int8_t* const (&x)[R], int64_t at) {
#pragma GCC unroll 8
    for (int l = 0; l < LINES; l++) {
        I w[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) w[c] = load_line(codes + l * PANEL_LINE + c * LINE);
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
            const I in = four_inputs(x[r] + at + 4 * l);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) dot<SMALL>(sum[r][c], w[c], in);
        }
    }
}

template <int R, int C>
inline __attribute__((always_inline)) void begin(I (&sum)[R][C], const Row (&rows)[R], int64_t stretch) {
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) {
        const I start = every(rows[r].start[stretch]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c] = start;
    }
}

// R rows times C vectors of outputs from `output` on, onto the tile.
template <int R, int C, Scales SCALES, bool ZEROS, bool SMALL>
void add_chunk(const Row (&rows)[R], const Chunk& chunk, int output, float* tile) {
    F total[R][C];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) total[r][c] = load(tile + r * PANEL + output + c * LANES);
    const int8_t* x[R];
    for (int r = 0; r < R; r++) x[r] = rows[r].x;
    const uint8_t* codes = chunk.codes + output * 4;
    const float *scales = chunk.scales + output, *zeros = chunk.zeros + output;
    int64_t at = 0, block = 0;
    for (int unit = 0; unit < chunk.units; block++) {
        I sum[R][C];
        if constexpr (SCALES == HALVES) {
            F part[R][C];
            begin(sum, rows, 2 * block);
            add_lines<R, C, 4, SMALL>(sum, codes, x, at);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const F scale = load(scales + c * LANES);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) part[r][c] = to_float(sum[r][c]) * scale;
            }
            begin(sum, rows, 2 * block + 1);
            add_lines<R, C, 4, SMALL>(sum, codes + 4 * PANEL_LINE, x, at + 16);
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
            unit++;
            codes += 8 * PANEL_LINE;
            at += UNIT;
        } else {
            begin(sum, rows, block);
            const int last = unit + chunk.block_units < chunk.units ? unit + chunk.block_units : chunk.units;
            for (; unit < last; unit++, codes += 8 * PANEL_LINE, at += UNIT) add_lines<R, C, 8, SMALL>(sum, codes, x, at);
            const int64_t group = SCALES == ROW ? 0 : block / chunk.blocks_in_group * PANEL;
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                const F scale = SCALES == ROW ? all(0.0f) : load(scales + group + c * LANES);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) {
                    F by = all(rows[r].scales[block]);
                    if constexpr (SCALES == BLOCKS) by = by * scale;
                    total[r][c] = fma(to_float(sum[r][c]), by, total[r][c]);
                    if constexpr (ZEROS && SCALES == BLOCKS)
                        total[r][c] = fma(load(zeros + group + c * LANES), all(rows[r].totals[block]), total[r][c]);
                }
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(tile + r * PANEL + output + c * LANES, total[r][c]);
}

using Add = void (*)(const uint8_t* data, int64_t stride, const BlockRow& row, const Chunk& chunk, float* tile);

template <int R, Scales SCALES, bool ZEROS, bool SMALL>
void add_rows(const uint8_t* data, int64_t stride, const BlockRow& row, const Chunk& chunk, float* tile) {
    auto run = [&](const Row (&rows)[R]) {
        for (int output = 0; output < PANEL; output += VECTORS * LANES)
            add_chunk<R, VECTORS, SCALES, ZEROS, SMALL>(rows, chunk, output, tile);
    };
    if constexpr (R == 1) run({Row(data, row, chunk)});
    else if constexpr (R == 2) run({Row(data, row, chunk), Row(data + stride, row, chunk)});
    else run({Row(data, row, chunk), Row(data + stride, row, chunk), Row(data + 2 * stride, row, chunk)});
}

template <bool ZEROS, bool SMALL>
Add choose(Scales scales, int rows) {
    static constexpr Add BY_ROWS[][ROWS] = {
        {add_rows<1, ROW, ZEROS, SMALL>, add_rows<2, ROW, ZEROS, SMALL>, add_rows<3, ROW, ZEROS, SMALL>},
        {add_rows<1, BLOCKS, ZEROS, SMALL>, add_rows<2, BLOCKS, ZEROS, SMALL>, add_rows<3, BLOCKS, ZEROS, SMALL>},
        {add_rows<1, HALVES, ZEROS, SMALL>, add_rows<2, HALVES, ZEROS, SMALL>, nullptr}};
    return BY_ROWS[scales][rows - 1];
}

Add choose(Scales scales, int rows, bool zeros, bool small) {
#if !defined(__AVX512VNNI__)
    if (small) return zeros ? choose<true, true>(scales, rows) : choose<false, true>(scales, rows);
#else
    (void)small;
#endif
    return zeros ? choose<true, false>(scales, rows) : choose<false, false>(scales, rows);
}

// Scales, and zeros, that all of a row shares.
void finish_rows(const BlockShape& shape, const Rows& rows, int first, int count, const BlockRow& row, const Panel& panel,
                 float* tile) {
    alignas(64) float scales[PANEL], zeros[PANEL];
    block_scales(shape, panel.data, 0, scales, zeros);
    for (int r = 0; r < count; r++) {
        const uint8_t* data = rows.data + (first + r) * rows.stride;
        const F total = all(reinterpret_cast<const float*>(data + row.totals_at)[row.stretches()]);
        for (int j = 0; j < PANEL; j += LANES) {
            float* to = tile + r * PANEL + j;
            F y = load(to) * load(scales + j);
            if (shape.zero != PST_Z_NONE) y = fma(load(zeros + j), total, y);
            store(to, y);
        }
    }
}

}  // namespace

void block_kernel_s8(const Rows& rows, int first, int count, const Panel& panel, float* tile) {
    const BlockShape& shape = *panel.block;
    const BlockRow row(shape.cols, shape.group, 1);
    alignas(64) uint8_t wide[CHUNK * PANEL];
    alignas(64) float scales[MOST_GROUPS * PANEL], zeros[MOST_GROUPS * PANEL];
    std::memset(tile, 0, size_t(count) * PANEL * 4);
    const Scales kind = !shape.group ? ROW : shape.group == 16 ? HALVES : BLOCKS;
    const int step = kind == HALVES ? HALF_ROWS : ROWS;
    const bool some_zeros = shape.zero != PST_Z_NONE;
    const bool small = shape.code != PST_C_U8 && shape.code != PST_C_T4;
    for (int64_t c = 0; c < shape.chunks(); c++) {
        if (shape.group) block_scales(shape, panel.data, c, scales, zeros);
        Chunk chunk;
        chunk.units = shape.units_of(c);
        chunk.codes = widen_codes(shape, panel.data, c, 0, chunk.units, wide);
        chunk.scales = scales;
        chunk.zeros = zeros;
        chunk.block_units = row.block / UNIT;
        chunk.blocks_in_group = shape.group ? std::max(1, shape.group / row.block) : 1;
        chunk.offset = widened_offset(shape);
        chunk.input = c * CHUNK;
        chunk.block = c * CHUNK / row.block;
        chunk.stretch = c * CHUNK / row.stretch;
        for (int r = 0; r < count; r += step) {
            const int some = std::min(step, count - r);
            choose(kind, some, some_zeros, small)(rows.data + (first + r) * rows.stride, rows.stride, row, chunk,
                                                  tile + r * PANEL);
        }
    }
    if (kind == ROW) finish_rows(shape, rows, first, count, row, panel, tile);
}

}  // namespace pst
