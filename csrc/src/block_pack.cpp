// Panels of codes: their shape, how they are filled, and what they stand for, number by number.
#include <cstring>

#include "block.h"
#include "grids.h"
#include "kernels.h"
#include "simd.h"

namespace pst {

namespace {

constexpr int32_t SCALE_BYTES[] = {4, 2, 2, 1, 1, 1, 1};
constexpr int32_t ZERO_BYTES[] = {0, 1, 2, 2, 2, 1};
constexpr int32_t CODE_BITS[] = {8, 6, 5, 4, 3, 2, 4, 4, 8};  // PST_C_U8 ... PST_C_E4M3

bool fits_groups(int32_t group) {
    return group == 0 || group == 16 || group == 32 || group == 64 || group == 128 || group == 256;
}

// ---- planes: a code of output `output` is input `k` of a unit

struct Place {
    int64_t byte;
    int shift;
};
// Of a plane of BITS bits.
template <int BITS>
Place place(int output, int k) {
    constexpr int IN_BYTE = 8 / BITS, LINE_INPUTS = 4 * IN_BYTE;
    return {(int64_t(k / LINE_INPUTS) * PANEL + output) * 4 + k % 4, k % LINE_INPUTS / 4 * BITS};
}
template <int BITS>
int get(const uint8_t* plane, int output, int k) {
    const Place at = place<BITS>(output, k);
    return plane[at.byte] >> at.shift & ((1 << BITS) - 1);
}
constexpr int plane_bytes(int bits) { return UNIT * PANEL * bits / 8; }

// A plane of BITS bits of an output: bits SHIFT ... of eight words of 4 codes each.
template <int BITS, int SHIFT>
void put(const uint32_t (&codes)[8], uint8_t* plane, int output) {
    constexpr int IN_BYTE = 8 / BITS;
    constexpr uint32_t MASK = ((1u << BITS) - 1) * 0x01010101u;
    for (int line = 0; line < 8 / IN_BYTE; line++) {
        uint32_t bytes = 0;
        for (int i = 0; i < IN_BYTE; i++) bytes |= (codes[line * IN_BYTE + i] >> SHIFT & MASK) << i * BITS;
        std::memcpy(plane + (line * PANEL + output) * 4, &bytes, 4);
    }
}

// 32 codes of an output. False if one has more bits.
bool put_codes(int bits, const uint8_t* codes, uint8_t* unit, int output) {
    uint32_t words[8], all = 0;
    std::memcpy(words, codes, UNIT);
    for (uint32_t word : words) all |= word;
    if (all & ~(((1u << bits) - 1) * 0x01010101u)) return false;
    switch (bits) {
        case 8: put<8, 0>(words, unit, output); return true;
        case 6: put<2, 4>(words, unit + plane_bytes(4), output); break;
        case 5: put<1, 4>(words, unit + plane_bytes(4), output); break;
        case 3: put<1, 2>(words, unit + plane_bytes(2), output); break;
    }
    if (bits >= 4) put<4, 0>(words, unit, output);
    else put<2, 0>(words, unit, output);
    return true;
}

int get_code(int bits, const uint8_t* unit, int output, int k) {
    switch (bits) {
        case 8: return get<8>(unit, output, k);
        case 6: return get<4>(unit, output, k) | get<2>(unit + plane_bytes(4), output, k) << 4;
        case 5: return get<4>(unit, output, k) | get<1>(unit + plane_bytes(4), output, k) << 4;
        case 3: return get<2>(unit, output, k) | get<1>(unit + plane_bytes(2), output, k) << 2;
        case 4: return get<4>(unit, output, k);
        default: return get<2>(unit, output, k);
    }
}

// ---- scales

float stored_number(int32_t scale, const uint8_t* at) {
    uint16_t half;
    float wide;
    switch (scale) {
        case PST_S_F32: std::memcpy(&wide, at, 4); return wide;
        case PST_S_F16: std::memcpy(&half, at, 2); return f16_to_f32(half);
        case PST_S_BF16: std::memcpy(&half, at, 2); return bf16_to_f32(half);
        case PST_S_E4M3: return e4m3_to_f32(*at);
        case PST_S_E8M0: return e8m0_to_f32(*at);
        case PST_S_I8_F16: return float(int8_t(*at));
        default: return float(*at);
    }
}

// Copies `each` bytes of every output to [64]; padding is zeros.
void put_numbers(const void* const* from, int64_t index, int each, uint8_t* to) {
    for (int j = 0; j < PANEL; j++) {
        if (!from[j]) std::memset(to + j * each, 0, size_t(each));
        else std::memcpy(to + j * each, static_cast<const uint8_t*>(from[j]) + index * each, size_t(each));
    }
}

// Two integers of 4 bits in a byte. False if one is larger.
bool put_nibbles(const BlockSource& from, int64_t index, uint8_t* to) {
    for (int j = 0; j < PANEL; j++) {
        to[j] = 0;
        if (!from.scales[j]) continue;
        const int scale = static_cast<const uint8_t*>(from.scales[j])[index];
        const int zero = static_cast<const uint8_t*>(from.zeros[j])[index];
        if (scale > 15 || zero > 15) return false;
        to[j] = uint8_t(scale | zero << 4);
    }
    return true;
}

// The scale of an output becomes NaN, and all that it multiplies: kernels take no code for one.
void spoil(int32_t scale, uint8_t* scales, uint8_t* supers, int output) {
    constexpr uint32_t NAN_OF[] = {0x7fc00000u, 0x7e00u, 0x7fc0u, 0x7fu, 0xffu};
    const bool of_super = scale >= PST_S_U8_F16;
    const int each = of_super ? 2 : SCALE_BYTES[scale];
    std::memcpy((of_super ? supers : scales) + output * each, &NAN_OF[of_super ? PST_S_F16 : scale], size_t(each));
}

bool complete(const BlockShape& s, const BlockSource& from) {
    return from.codes && (s.block_bytes || from.scales) && (!s.super_bytes || from.supers) &&
           (s.zero == PST_Z_NONE || from.zeros) && (!s.super_zero_bytes || from.super_zeros);
}

}  // namespace

bool block_shape(const pst_matrix& m, BlockShape& s) {
    s = {};
    if (m.format != PST_M_BLOCK || m.cols <= 0 || m.code < PST_C_U8 || m.code > PST_C_TQ1_0) return false;
    s.cols = m.cols, s.code = m.code, s.factor = m.factor, s.table = m.table, s.offset = m.offset;
    if (m.code > PST_C_E4M3) {
        s.block_bytes = grid_bytes(m.code);
        s.group = grid_group(m.code);
        s.offset = 0;
        return m.cols % CHUNK == 0 && m.scale == 0 && m.zero == PST_Z_NONE;
    }
    if (m.scale < PST_S_F32 || m.scale > PST_S_I8_F16 || m.zero < PST_Z_NONE || m.zero > PST_Z_U8_F16) return false;
    const bool supers = m.scale >= PST_S_U8_F16, super_zeros = m.zero == PST_Z_U8_F16;
    if (!fits_groups(m.group) || ((supers || super_zeros) && !m.group)) return false;
    s.group = m.group, s.scale = m.scale, s.zero = m.zero;
    s.nibbles = m.code == PST_C_U2 && m.scale == PST_S_U8_F16 && super_zeros;
    s.code_bytes = plane_bytes(CODE_BITS[m.code]);
    s.scale_bytes = SCALE_BYTES[m.scale] * PANEL;
    s.zero_bytes = s.nibbles ? 0 : ZERO_BYTES[m.zero] * PANEL;
    s.super_bytes = supers ? 2 * PANEL : 0;
    s.super_zero_bytes = super_zeros ? 2 * PANEL : 0;
    return true;
}

bool pack_block(const BlockShape& s, const BlockSource& from, uint8_t* panel) {
    if (!complete(s, from)) return false;
    uint8_t* at = panel;
    if (!s.group) {
        put_numbers(from.scales, 0, s.scale_bytes / PANEL, at);
        if (s.zero_bytes) put_numbers(from.zeros, 0, s.zero_bytes / PANEL, at + s.scale_bytes);
        at += s.row_head();
    }
    for (int64_t c = 0; c < s.chunks(); c++) {
        if (s.block_bytes) {
            put_numbers(from.codes, c, s.block_bytes, at);
            at += s.chunk_bytes();
            continue;
        }
        uint8_t* const head = at;
        if (s.super_bytes) put_numbers(from.supers, c, 2, at);
        at += s.super_bytes;
        if (s.super_zero_bytes) put_numbers(from.super_zeros, c, 2, at);
        at += s.super_zero_bytes;
        const int groups = s.groups_of(c);
        const int64_t first = s.group ? c * (CHUNK / s.group) : 0, last = (s.cols - 1) / std::max(1, s.group);
        uint8_t* const scales = s.group ? at : panel;
        // What a file has of the last group is behind `last` where units are padded.
        for (int g = 0; g < groups; g++, at += s.scale_bytes) {
            const int64_t index = std::min(first + g, last);
            if (s.nibbles) {
                if (!put_nibbles(from, index, at)) return false;
            } else put_numbers(from.scales, index, s.scale_bytes / PANEL, at);
        }
        for (int g = 0; g < groups && s.zero_bytes; g++, at += s.zero_bytes)
            put_numbers(from.zeros, std::min(first + g, last), s.zero_bytes / PANEL, at);
        const int bits = CODE_BITS[s.code];
        std::memset(at, 0, size_t(s.units_of(c)) * size_t(s.code_bytes));
        const int inputs = int(std::min<int64_t>(CHUNK, s.cols - c * CHUNK));
        for (int j = 0; j < PANEL; j++) {
            if (!from.codes[j]) continue;
            const uint8_t* codes = static_cast<const uint8_t*>(from.codes[j]) + c * CHUNK;
            for (int k = 0; k < inputs; k += UNIT) {
                uint8_t last[UNIT] = {};
                if (inputs - k < UNIT) std::memcpy(last, codes + k, size_t(inputs - k));
                if (!put_codes(bits, inputs - k < UNIT ? last : codes + k, at + k / UNIT * s.code_bytes, j)) return false;
            }
            for (int k = 0; k < inputs && s.code == PST_C_E4M3; k++)
                if (codes[k] % 128 == 127) spoil(s.scale, scales + (s.group ? k / s.group : 0) * s.scale_bytes, head, j);
        }
        at += int64_t(s.units_of(c)) * s.code_bytes;
    }
    return true;
}

void block_values(const BlockShape& s, const uint8_t* panel, int output, float* out) {
    for (int64_t c = 0; c < s.chunks(); c++) {
        const uint8_t* at = panel + s.chunk_at(c);
        const int inputs = int(std::min<int64_t>(CHUNK, s.cols - c * CHUNK)), groups = s.groups_of(c);
        float* to = out + c * CHUNK;
        if (s.block_bytes) {
            uint8_t values[CHUNK];
            float scales[MOST_GROUPS];
            grid_values(s.code, at + output * s.block_bytes, values);
            grid_scales(s.code, at + output * s.block_bytes, scales);
            for (int k = 0; k < inputs; k++) to[k] = float(values[k] - GRID_OFFSET) * (scales[k / s.group] * s.factor);
            continue;
        }
        const uint8_t* scales = (s.group ? at + s.super_bytes + s.super_zero_bytes : panel);
        const uint8_t* zeros = scales + std::max(1, groups) * s.scale_bytes;
        const uint8_t* codes = at + s.head_of(groups);
        const float super = (s.super_bytes ? stored_number(PST_S_F16, at + 2 * output) : 1.0f) * s.factor;
        const float super_zero = s.super_zero_bytes ? stored_number(PST_S_F16, at + s.super_bytes + 2 * output) : 1.0f;
        const int scale_each = s.scale_bytes / PANEL, zero_each = s.zero_bytes / PANEL;
        for (int k = 0; k < inputs; k++) {
            const int64_t g = s.group ? k / s.group : 0;
            const uint8_t* stored = scales + g * s.scale_bytes + output * scale_each;
            const uint8_t* zero = zeros + g * s.zero_bytes + output * zero_each;
            const float scale = (s.nibbles ? float(*stored & 15) : stored_number(s.scale, stored)) * super;
            const int code = get_code(CODE_BITS[s.code], codes + k / UNIT * s.code_bytes, output, k % UNIT);
            float value = float(code - s.offset);
            if (s.code == PST_C_T4 || s.code == PST_C_F4) value = s.table[code];
            if (s.code == PST_C_E4M3) value = e4m3_to_f32(uint8_t(code));
            switch (s.zero) {
                case PST_Z_U8: to[k] = (value - float(*zero)) * scale; break;
                case PST_Z_F16_CODES: to[k] = (value - stored_number(PST_S_F16, zero)) * scale; break;
                case PST_Z_BF16_CODES: to[k] = (value - stored_number(PST_S_BF16, zero)) * scale; break;
                case PST_Z_F16: to[k] = value * scale - stored_number(PST_S_F16, zero); break;
                case PST_Z_U8_F16:
                    to[k] = value * scale - float(s.nibbles ? *stored >> 4 : int(*zero)) * super_zero;
                    break;
                default: to[k] = value * scale;
            }
        }
    }
}

}  // namespace pst
