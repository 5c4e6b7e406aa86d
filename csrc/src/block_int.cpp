// Products of rows of 8 bits in blocks with panels of PST_M_BLOCK (docs/design/0014).
#include "block_int.h"

namespace pst {

// block_few.cpp: of codes as they lie; null where such are made ready even for few rows.
const Add* find_few(int32_t code, Scales scales, bool zeros);

namespace {

// Rows for which codes are turned in registers; more meet a chunk that is made ready once.
constexpr int FEW_ROWS = 6;

template <class Code>
const Add* wide(Scales scales, bool zeros) {
    static constexpr const Add* KERNELS[][2] = {{BY_ROWS<Code, ROW, false>, BY_ROWS<Code, ROW, true>},
                                                {BY_ROWS<Code, BLOCKS, false>, BY_ROWS<Code, BLOCKS, true>},
                                                {BY_ROWS<Code, HALVES, false>, BY_ROWS<Code, HALVES, true>},
                                                {BY_ROWS<Code, LONG, false>, BY_ROWS<Code, LONG, true>}};
    return KERNELS[scales][zeros];
}

const Add* find_wide(Scales scales, bool zeros, [[maybe_unused]] int32_t code) {
#if defined(PST_SIGNED_BYTES)
    if (code == PST_C_U4 || code == PST_C_U3 || code == PST_C_U2) return wide<CodeNibbles>(scales, zeros);
    if (code != PST_C_U8 && code != PST_C_T4) return wide<Code7>(scales, zeros);
#endif
    return wide<Code8>(scales, zeros);
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

// What a row brings to a chunk. Rows lie so far apart that the processor does not see the next one coming.
void fetch_row(const uint8_t* data, const BlockRow& row, const Chunk& chunk) {
    for (int i = 0; i < CHUNK; i += LINE) __builtin_prefetch(data + chunk.input + i);
    __builtin_prefetch(data + row.scales_at + chunk.block * 4);
    if (chunk.offset) __builtin_prefetch(data + row.sums_at + chunk.stretch * 4);
    if (chunk.zeros) __builtin_prefetch(data + row.totals_at + chunk.stretch * 4);
}

}  // namespace

void block_kernel_s8(const Rows& rows, int first, int count, const Panel& panel, float* tile) {
    const BlockShape& shape = *panel.block;
    const BlockRow row(shape.cols, shape.group, 1);
    alignas(64) uint8_t wide_codes[CHUNK * PANEL];
    alignas(64) float scales[MOST_GROUPS * PANEL], zeros[MOST_GROUPS * PANEL];
    std::memset(tile, 0, size_t(count) * PANEL * 4);
    const Scales kind = !shape.group ? ROW : shape.group == 16 ? HALVES : row.block > UNIT ? LONG : BLOCKS;
    const int step = kind == HALVES ? HALF_ROWS : ROWS;
    const bool some_zeros = shape.zero != PST_Z_NONE;
#if defined(PST_SIGNED_BYTES)
    const bool turned = count <= (shape.code == PST_C_U8 || shape.code == PST_C_T4 ? 2 : FEW_ROWS);
#else
    const bool turned = count <= FEW_ROWS;
#endif
    const Add* few = turned ? find_few(shape.code, kind, some_zeros) : nullptr;
    const Add* add = few ? few : find_wide(kind, some_zeros, shape.code);
    const bool as_they_lie = few || shape.code == PST_C_U8;
    const int64_t ahead = count <= FEW_ROWS ? STREAM_AHEAD : 0;
    Chunk chunk;
    chunk.scales = scales;
    chunk.zeros = zeros;
    chunk.block_units = row.block / UNIT;
    chunk.shift = shape.group > row.block ? __builtin_ctz(unsigned(shape.group / row.block)) : 0;
    chunk.offset = widened_offset(shape);
    chunk.ahead = ahead;
    [[maybe_unused]] const bool middle = chunk.offset == 128;
    for (int64_t c = 0; c < shape.chunks(); c++) {
        if (shape.group) block_scales(shape, panel.data, c, ahead, scales, zeros);
        chunk.units = shape.units_of(c);
        chunk.codes = as_they_lie ? codes_at(shape, panel.data, c) : widen_codes(shape, panel.data, c, 0, chunk.units, wide_codes);
#if defined(PST_SIGNED_BYTES)
        if (middle && !few) {  // codes of -128 are rare
            const bool fits = less_128(chunk.codes, int64_t(chunk.units) * UNIT * PANEL, wide_codes);
            if (fits) chunk.codes = wide_codes;
            else chunk.codes = as_they_lie ? chunk.codes : widen_codes(shape, panel.data, c, 0, chunk.units, wide_codes);
            chunk.offset = fits ? 0 : 128;
            add = fits ? wide<CodeS8>(kind, some_zeros) : wide<Code8>(kind, some_zeros);
        }
#endif
        chunk.input = c * CHUNK;
        chunk.block = c * CHUNK / row.block;
        chunk.stretch = c * CHUNK / row.stretch;
        // What is made ready next, of this panel or the one behind it, is fetched meanwhile: a part with each turn.
        const int64_t turns = (count + step - 1) / step;
        const int64_t part = few ? 0 : (shape.chunk_bytes() / turns + LINE) / LINE * LINE;
        const uint8_t* coming = panel.data + shape.chunk_at(c + 1);
        for (int r = 0; r < count; r += step) {
            for (int64_t i = 0; i < part; i += LINE) __builtin_prefetch(coming + i, 0, 2);
            coming += part;
            for (int next = r + step; next < std::min(r + 2 * step, count); next++)
                fetch_row(rows.data + (first + next) * rows.stride, row, chunk);
            add[std::min(step, count - r) - 1](shape, rows.data + (first + r) * rows.stride, rows.stride, row, chunk,
                                               tile + r * PANEL);
        }
    }
    if (kind == ROW) finish_rows(shape, rows, first, count, row, panel, tile);
}

}  // namespace pst
