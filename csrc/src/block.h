// Where things lie in panels of PST_M_BLOCK.
//
// Inputs are taken in units of 32 and chunks of 256, padded to whole units. A chunk of a panel is
//
//   supers [64] half, super zeros [64] half, scales [groups][64], zeros [groups][64], codes of its units
//
// as far as the format has them; scales and zeros that all of a row shares lie once, in front of the first chunk. So
// what few rows read is one stream. Codes of a unit are planes of lines of 64 bytes, 4 bytes of each of 16 outputs; the
// low bits of byte b of a line are the earliest inputs k = b, b + 4, ...:
//
//   8 bits [8][64][4], 4 bits [4][64][4], 2 bits [2][64][4], 1 bit [64][4]
//
// 6, 5 and 3 bits are a plane of 4 (4, 2) bits and one of the upper 2 (1, 1). Rows of ggml's blocks are [64] blocks in
// each chunk, and nothing else. Where scale and zero are integers of 4 bits (those of 2-bit codes with supers, Q2_K of
// ggml), both are one byte: scale | zero << 4.
#pragma once

#include <algorithm>
#include <cstdint>

#include "penstock.h"

namespace pst {

constexpr int UNIT = 32;            // inputs
constexpr int CHUNK = 256;          // inputs
constexpr int UNITS = CHUNK / UNIT; // of a chunk
constexpr int MOST_GROUPS = 16;     // of a chunk

struct BlockShape {
    int32_t cols, code, scale, zero, offset;
    float factor;
    const float* table;
    int32_t group;        // of what is multiplied: that of the blocks, where codes are such; 0: all of a row
    int32_t block_bytes;  // of ggml's blocks, else 0
    int32_t code_bytes;   // of a unit of 64 outputs
    int32_t scale_bytes, zero_bytes, super_bytes, super_zero_bytes;  // of 64 outputs
    bool nibbles;

    int64_t units() const { return (int64_t(cols) + UNIT - 1) / UNIT; }
    int64_t chunks() const { return (int64_t(cols) + CHUNK - 1) / CHUNK; }
    int units_of(int64_t chunk) const { return int(std::min<int64_t>(UNITS, units() - chunk * UNITS)); }
    // Scales that lie in a chunk.
    int groups_of(int64_t chunk) const {
        return group ? (units_of(chunk) * UNIT + group - 1) / group : 0;
    }
    int64_t row_head() const { return group ? 0 : scale_bytes + zero_bytes; }
    int64_t head_of(int groups) const {
        return super_bytes + super_zero_bytes + int64_t(groups) * (scale_bytes + zero_bytes);
    }
    int64_t chunk_bytes() const {
        return block_bytes ? int64_t(block_bytes) * PST_PANEL : head_of(group ? CHUNK / group : 0) + UNITS * code_bytes;
    }
    int64_t chunk_at(int64_t chunk) const { return row_head() + chunk * chunk_bytes(); }
    int64_t panel_bytes() const {
        if (block_bytes) return chunks() * chunk_bytes();
        const int64_t last = chunks() - 1;
        return chunk_at(last) + head_of(groups_of(last)) + int64_t(units_of(last)) * code_bytes;
    }
};

// False for what no format has. Of `m` only what says the format is looked at.
bool block_shape(const pst_matrix& m, BlockShape& shape);

inline bool has_integer_rows(int32_t code) { return code != PST_C_F4 && code != PST_C_E4M3; }

// Numbers of one panel as they are.
void block_values(const BlockShape& shape, const uint8_t* panel, int output, float* out);
// Panel of codes: see pst_pack_codes; pointers are those of its 64 outputs.
struct BlockSource {
    const void* const* codes;
    const void* const* scales;
    const void* const* supers;
    const void* const* zeros;
    const void* const* super_zeros;
};
// False where a number has more bits than there is room for.
bool pack_block(const BlockShape& shape, const BlockSource& from, uint8_t* panel);

// ---- a chunk made ready for products

// Values of the scales of a chunk, [groups][64], and minus those of its zeros, if it has zeros. Of a whole row's: chunk 0.
// What lies `ahead` bytes behind them is fetched, unless that is 0.
void block_scales(const BlockShape& shape, const uint8_t* panel, int64_t chunk, int64_t ahead, float* scales, float* zeros);

const uint8_t* codes_at(const BlockShape& shape, const uint8_t* panel, int64_t chunk);

// What the codes of a chunk have added when they are widened.
int32_t widened_offset(const BlockShape& shape);
// Codes of units first ... first+count-1 of a chunk as bytes, [count * 8][64][4]. Returns them: in `out`, or where they lie.
const uint8_t* widen_codes(const BlockShape& shape, const uint8_t* panel, int64_t chunk, int first, int count, uint8_t* out);
// The same as pairs of bfloat16, [count * 16][64][2], their offsets taken out. Not of F4.
void widen_pairs(const BlockShape& shape, const uint8_t* panel, int64_t chunk, int first, int count, uint8_t* out);
// The same of F4 as float, [count * 32][64].
void widen_floats(const BlockShape& shape, const uint8_t* panel, int64_t chunk, int first, int count, float* out);

}  // namespace pst
