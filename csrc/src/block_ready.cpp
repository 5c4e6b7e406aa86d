// Chunks of PST_M_BLOCK made ready for products of many rows: codes as bytes, bfloat16 or floats.
#include <cstring>

#include "block.h"
#include "block_codes.h"
#include "grids.h"
#include "kernels.h"

namespace pst {

namespace {

struct Table {
    float values[256];
    Table() {
        for (int i = 0; i < 256; i++) values[i] = e4m3_to_f32(uint8_t(i));
    }
};
const Table E4M3;

constexpr int GRID_OFFSET = 64;  // numbers of all grids are smaller

void widen_blocks(const BlockShape& s, const uint8_t* blocks, int first, int count, uint8_t* out) {
    int8_t values[CHUNK];
    for (int j = 0; j < PANEL; j++) {
        grid_values(s.code, blocks + j * s.block_bytes, values);
        for (int k = 0; k < count * UNIT; k += 4) {
            uint32_t four;
            std::memcpy(&four, values + first * UNIT + k, 4);
            four ^= 0x80808080u;                       // as byte + 128; no lane is below 64
            four -= 0x01010101u * (128 - GRID_OFFSET);
            std::memcpy(out + (int64_t(k / 4) * PANEL + j) * 4, &four, 4);
        }
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

void widen_pairs(const BlockShape& s, const uint8_t* panel, int64_t chunk, int first, int count, uint8_t* out) {
    alignas(64) uint8_t bytes[CHUNK * PANEL];
    const uint8_t* lines = widen_codes(s, panel, chunk, first, count, bytes);
    const int32_t offset = widened_offset(s);
    const bool floats = s.code == PST_C_E4M3;
    for (int line = 0; line < count * 8; line++)
        for (int j = 0; j < PANEL; j += LANES)
            for (int pair = 0; pair < 2; pair++) {
                float even[LANES], odd[LANES];
                for (int i = 0; i < LANES; i++) {
                    const uint8_t* four = lines + (line * PANEL + j + i) * 4 + 2 * pair;
                    even[i] = floats ? E4M3.values[four[0]] : float(four[0] - offset);
                    odd[i] = floats ? E4M3.values[four[1]] : float(four[1] - offset);
                }
                uint16_t low[LANES], high[LANES];
                store_bf16(low, load(even));
                store_bf16(high, load(odd));
                uint32_t both[LANES];
                for (int i = 0; i < LANES; i++) both[i] = low[i] | uint32_t(high[i]) << 16;
                std::memcpy(out + ((line * 2 + pair) * PANEL + j) * 4, both, sizeof both);
            }
}

void widen_floats(const BlockShape& s, const uint8_t* panel, int64_t chunk, int first, int count, float* out) {
    const uint8_t* at = codes_at(s, panel, chunk) + first * s.code_bytes;
    for (int u = 0; u < count; u++, at += s.code_bytes)
        for (int k = 0; k < UNIT; k++)
            for (int j = 0; j < PANEL; j++) {
                const int byte = at[(k / 8 * PANEL + j) * 4 + k % 4];
                *out++ = s.table[k & 4 ? byte >> 4 : byte & 15];
            }
}

}  // namespace pst
