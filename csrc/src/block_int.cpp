// Products of rows of 8 bits in blocks with panels of PST_M_BLOCK (docs/design/0014).
#include "block_int.h"

namespace pst {

// block_few.cpp: of codes as they lie; null where such are made ready even for few rows.
const Add* find_few(int32_t code, Scales scales, bool zeros);

namespace {

// Rows for which codes are turned in registers; more meet a chunk that is made ready once.
constexpr int FEW_ROWS = 6;

const Add* find_wide(Scales scales, bool zeros, bool small) {
#if !defined(__AVX512VNNI__)
    static constexpr const Add* SMALL[][2] = {{BY_ROWS<Code7, ROW, false>, BY_ROWS<Code7, ROW, true>},
                                              {BY_ROWS<Code7, BLOCKS, false>, BY_ROWS<Code7, BLOCKS, true>},
                                              {BY_ROWS<Code7, HALVES, false>, BY_ROWS<Code7, HALVES, true>}};
    if (small) return SMALL[scales][zeros];
#else
    (void)small;
#endif
    static constexpr const Add* ANY[][2] = {{BY_ROWS<Code8, ROW, false>, BY_ROWS<Code8, ROW, true>},
                                            {BY_ROWS<Code8, BLOCKS, false>, BY_ROWS<Code8, BLOCKS, true>},
                                            {BY_ROWS<Code8, HALVES, false>, BY_ROWS<Code8, HALVES, true>}};
    return ANY[scales][zeros];
}

// Scales, and zeros, that all of a row shares.
void finish_rows(const BlockShape& shape, const Rows& rows, int first, int count, const BlockRow& row, const Panel& panel,
                 float* tile) {
    alignas(64) float scales[PANEL], zeros[PANEL];
    block_scales(shape, panel.data, 0, 0, scales, zeros);
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
    const Add* few = count <= FEW_ROWS ? find_few(shape.code, kind, some_zeros) : nullptr;
    const Add* add = few ? few : find_wide(kind, some_zeros, shape.code != PST_C_U8 && shape.code != PST_C_T4);
    const bool as_they_lie = few || shape.code == PST_C_U8;
    const int64_t ahead = count <= FEW_ROWS ? STREAM_AHEAD : 0;
    Chunk chunk;
    chunk.scales = scales;
    chunk.zeros = zeros;
    chunk.block_units = row.block / UNIT;
    chunk.shift = shape.group > row.block ? __builtin_ctz(unsigned(shape.group / row.block)) : 0;
    chunk.offset = widened_offset(shape);
    chunk.ahead = ahead;
    for (int64_t c = 0; c < shape.chunks(); c++) {
        if (shape.group) block_scales(shape, panel.data, c, ahead, scales, zeros);
        chunk.units = shape.units_of(c);
        chunk.codes = as_they_lie ? codes_at(shape, panel.data, c) : widen_codes(shape, panel.data, c, 0, chunk.units, wide);
        chunk.input = c * CHUNK;
        chunk.block = c * CHUNK / row.block;
        chunk.stretch = c * CHUNK / row.stretch;
        for (int r = 0; r < count; r += step) {
            add[std::min(step, count - r) - 1](shape, rows.data + (first + r) * rows.stride, rows.stride, row, chunk,
                                               tile + r * PANEL);
        }
    }
    if (kind == ROW) finish_rows(shape, rows, first, count, row, panel, tile);
}

}  // namespace pst
