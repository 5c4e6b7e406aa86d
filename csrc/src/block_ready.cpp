// Chunks of PST_M_BLOCK made ready for products of many rows: codes as bytes, bfloat16 or floats.
#include <cstring>

#include "block.h"
#include "block_floats.h"
#include "grids.h"
#include "kernels.h"

namespace pst {

namespace {

void widen_blocks(const BlockShape& s, const uint8_t* blocks, int first, int count, uint8_t* out) {
    uint8_t values[CHUNK];
    for (int j = 0; j < PANEL; j++) {
        grid_values(s.code, blocks + j * s.block_bytes, values);
        for (int k = 0; k < count * UNIT; k += 4)
            std::memcpy(out + (int64_t(k / 4) * PANEL + j) * 4, values + first * UNIT + k, 4);
    }
}

template <class Code>
void widen_units(const BlockShape& s, const uint8_t* unit, int count, uint8_t* out) {
    const Code code(s);
    for (int u = 0; u < count; u++, unit += s.code_bytes)
        for (int c = 0; c < PANEL / LANES; c++) widen_unit(code, unit, c, out + u * UNIT * PANEL, std::make_integer_sequence<int, 8>());
}

}  // namespace

const uint8_t* codes_at(const BlockShape& s, const uint8_t* panel, int64_t chunk) {
    return panel + s.chunk_at(chunk) + (s.block_bytes ? 0 : s.head_of(s.groups_of(chunk)));
}

int32_t widened_offset(const BlockShape& s) {
    return s.block_bytes ? GRID_OFFSET : s.code == PST_C_T4 ? TABLE_OFFSET : s.offset;
}

const uint8_t* widen_codes(const BlockShape& s, const uint8_t* panel, int64_t chunk, int first, int count, uint8_t* out) {
    const uint8_t* at = codes_at(s, panel, chunk);
    if (s.block_bytes) {
        widen_blocks(s, at, first, count, out);
        return out;
    }
    at += first * s.code_bytes;
    switch (s.code) {
        case PST_C_U6: widen_units<Code6>(s, at, count, out); break;
        case PST_C_U5: widen_units<Code5>(s, at, count, out); break;
        case PST_C_U4: widen_units<Code4>(s, at, count, out); break;
        case PST_C_U3: widen_units<Code3>(s, at, count, out); break;
        case PST_C_U2: widen_units<Code2>(s, at, count, out); break;
        case PST_C_T4: widen_units<CodeT4>(s, at, count, out); break;
        default: return at;  // 8 bits
    }
    return out;
}

namespace {

template <class Source, int L>
inline __attribute__((always_inline)) void store_pairs(const Source& source, const uint8_t* unit, uint8_t* out) {
    store_line(out + 2 * L * PANEL_LINE, source.template pairs<L, 0>(unit));
    store_line(out + (2 * L + 1) * PANEL_LINE, source.template pairs<L, 1>(unit));
}
template <class Source, int L>
inline __attribute__((always_inline)) void store_floats(const Source& source, const uint8_t* unit, uint8_t* out) {
    const TwoFloats first = source.template floats<L, 0>(unit), second = source.template floats<L, 1>(unit);
    store_line(out + 4 * L * PANEL_LINE, as_ints(first.even));
    store_line(out + (4 * L + 1) * PANEL_LINE, as_ints(first.odd));
    store_line(out + (4 * L + 2) * PANEL_LINE, as_ints(second.even));
    store_line(out + (4 * L + 3) * PANEL_LINE, as_ints(second.odd));
}

template <class Source, bool PAIRS, int... L>
void turn(const BlockShape& s, const uint8_t* unit, int count, uint8_t* out, std::integer_sequence<int, L...>) {
    const Source source(s);
    for (int u = 0; u < count; u++, unit += Source::BYTES, out += UNIT * PANEL * (PAIRS ? 2 : 4))
        for (int c = 0; c < PANEL / LANES; c++) {
            if constexpr (PAIRS) (store_pairs<Source, L>(source, unit + c * LINE, out + c * LINE), ...);
            else (store_floats<Source, L>(source, unit + c * LINE, out + c * LINE), ...);
        }
}
constexpr auto LINES = std::make_integer_sequence<int, 8>();

}  // namespace

void widen_pairs(const BlockShape& s, const uint8_t* panel, int64_t chunk, int first, int count, uint8_t* out) {
    if (s.code == PST_C_E4M3)
        return turn<SmallFloats, true>(s, codes_at(s, panel, chunk) + first * s.code_bytes, count, out, LINES);
#if defined(__AVX512F__)
    if (s.code == PST_C_U4 || s.code == PST_C_T4)
        return turn<Nibbles, true>(s, codes_at(s, panel, chunk) + first * s.code_bytes, count, out, LINES);
#endif
    alignas(64) uint8_t bytes[CHUNK * PANEL];
    turn<Whole<Code8>, true>(s, widen_codes(s, panel, chunk, first, count, bytes), count, out, LINES);
}

void widen_floats(const BlockShape& s, const uint8_t* panel, int64_t chunk, int first, int count, float* out) {
    const uint8_t* at = codes_at(s, panel, chunk) + first * s.code_bytes;
    turn<TableFloats, false>(s, at, count, reinterpret_cast<uint8_t*>(out), LINES);
}

}  // namespace pst
