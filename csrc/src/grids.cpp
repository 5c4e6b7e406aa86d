// ggml's blocks of 256: IQ1 to IQ3 and TQ1_0 (https://github.com/ggml-org/ggml, src/ggml-common.h and ggml-quants.c).
#include "grids.h"

#include <cstring>

#include "grid_tables.h"
#include "penstock.h"
#include "simd.h"

namespace pst {

namespace {

constexpr int32_t BYTES[] = {110, 98, 82, 74, 66, 50, 56, 54};
constexpr int32_t GROUPS[] = {32, 32, 16, 16, 32, 32, 16, 256};  // PST_C_IQ3_S ... PST_C_TQ1_0

constexpr uint64_t ONES = 0x0101010101010101u;

// Vectors as they are multiplied, a byte for each number, with GRID_OFFSET added. The compiler makes these tables: what a
// library runs when it is opened runs on every processor, on those, too, that this file's instructions end (score.cpp).
template <int N>
struct Vectors {
    uint64_t of[N];
    // Of `numbers` numbers of `bits` bits each.
    constexpr Vectors(const uint16_t (&words)[N], int numbers, int bits, const int8_t* levels) : of{} {
        for (int i = 0; i < N; i++)
            for (int k = 0; k < numbers; k++)
                of[i] |= uint64_t(levels[words[i] >> (bits * k) & ((1 << bits) - 1)] + GRID_OFFSET) << 8 * k;
    }
};

constexpr int8_t LEVELS2[] = {8, 25, 43}, LEVELS3_XXS[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr int8_t LEVELS3[] = {1, 3, 5, 7, 9, 11, 13, 15}, LEVELS1[] = {-8, 0, 8};  // in eighths
constexpr Vectors<256> IQ2_XXS(GRID_IQ2_XXS, 8, 2, LEVELS2);
constexpr Vectors<512> IQ2_XS(GRID_IQ2_XS, 8, 2, LEVELS2);
constexpr Vectors<1024> IQ2_S(GRID_IQ2_S, 8, 2, LEVELS2);
constexpr Vectors<256> IQ3_XXS(GRID_IQ3_XXS, 4, 3, LEVELS3_XXS);
constexpr Vectors<512> IQ3_S(GRID_IQ3_S, 4, 3, LEVELS3);
constexpr Vectors<2048> IQ1(GRID_IQ1, 8, 2, LEVELS1);

// A byte of ones for each bit.
struct Signs {
    uint64_t of[256];
    constexpr Signs() : of{} {
        for (int i = 0; i < 256; i++)
            for (int k = 0; k < 8; k++) of[i] |= i >> k & 1 ? uint64_t(255) << 8 * k : 0;
    }
};
constexpr Signs SIGNS;

inline uint16_t word(const uint8_t* p) {
    uint16_t x;
    std::memcpy(&x, p, 2);
    return x;
}
inline uint32_t word32(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// Seven signs are kept; the eighth makes their number even.
inline int all_signs(uint32_t seven) { return int(seven | uint32_t(__builtin_parity(seven)) << 7); }

// Eight numbers; those whose bit is set are the negative ones.
inline void put_signed(uint8_t* to, uint64_t numbers, int signs) {
    const uint64_t negative = ONES * (2 * GRID_OFFSET) - numbers;  // byte by byte: none is above twice the offset
    numbers ^= (numbers ^ negative) & SIGNS.of[signs];
    std::memcpy(to, &numbers, 8);
}

void iq2_xxs(const uint8_t* b, uint8_t* to) {
    for (int g = 0; g < 8; g++) {
        const uint8_t* at = b + 2 + 8 * g;
        const uint32_t rest = word32(at + 4);
        for (int l = 0; l < 4; l++, to += 8) put_signed(to, IQ2_XXS.of[at[l]], all_signs(rest >> 7 * l & 127));
    }
}

void iq2_xs(const uint8_t* b, uint8_t* to) {
    for (int i = 0; i < 32; i++, to += 8) {
        const uint16_t code = word(b + 2 + 2 * i);
        put_signed(to, IQ2_XS.of[code & 511], all_signs(code >> 9));
    }
}

void iq2_s(const uint8_t* b, uint8_t* to) {
    for (int i = 0; i < 32; i++, to += 8) {
        const int high = b[66 + i / 4] >> 2 * (i % 4) & 3;
        put_signed(to, IQ2_S.of[b[2 + i] | high << 8], b[34 + i]);
    }
}

void iq3_xxs(const uint8_t* b, uint8_t* to) {
    for (int g = 0; g < 8; g++) {
        const uint32_t rest = word32(b + 66 + 4 * g);
        for (int l = 0; l < 4; l++, to += 8) {
            const uint8_t* at = b + 2 + 8 * g + 2 * l;
            put_signed(to, IQ3_XXS.of[at[0]] | IQ3_XXS.of[at[1]] << 32, all_signs(rest >> 7 * l & 127));
        }
    }
}

void iq3_s(const uint8_t* b, uint8_t* to) {
    for (int g = 0; g < 8; g++) {
        for (int l = 0; l < 4; l++, to += 8) {
            const uint8_t *at = b + 2 + 8 * g + 2 * l;
            const int high = b[66 + g] >> 2 * l;
            const uint64_t first = IQ3_S.of[at[0] | (high & 1) << 8], second = IQ3_S.of[at[1] | (high & 2) << 7];
            put_signed(to, first | second << 32, b[74 + 4 * g + l]);
        }
    }
}

// A vector of -1, 0 and 1, an eighth more or less, in eighths.
inline void put_shifted(uint8_t* to, uint64_t numbers, bool less) {
    numbers += less ? 0 - ONES : ONES;
    std::memcpy(to, &numbers, 8);
}

void iq1_s(const uint8_t* b, uint8_t* to) {
    for (int g = 0; g < 8; g++) {
        const int high = word(b + 34 + 2 * g);
        for (int l = 0; l < 4; l++, to += 8)
            put_shifted(to, IQ1.of[b[2 + 4 * g + l] | (high >> 3 * l & 7) << 8], high & 0x8000);
    }
}

void iq1_m(const uint8_t* b, uint8_t* to) {
    for (int i = 0; i < 32; i++, to += 8) {
        const int high = b[32 + i / 2] >> 4 * (i % 2) & 15;
        put_shifted(to, IQ1.of[b[i] | (high & 7) << 8], high & 8);
    }
}

void tq1_0(const uint8_t* b, uint8_t* to) {
    constexpr uint8_t POWERS[] = {1, 3, 9, 27, 81};
    auto digits = [&](const uint8_t* from, int bytes, int count) {
        for (int n = 0; n < count; n++)
            for (int i = 0; i < bytes; i++) *to++ = uint8_t((uint8_t(from[i] * POWERS[n]) * 3 >> 8) + GRID_OFFSET - 1);
    };
    digits(b, 32, 5);
    digits(b + 32, 16, 5);
    digits(b + 48, 4, 4);
}

}  // namespace

int32_t grid_bytes(int32_t code) { return BYTES[code - PST_C_IQ3_S]; }
int32_t grid_group(int32_t code) { return GROUPS[code - PST_C_IQ3_S]; }

void grid_values(int32_t code, const uint8_t* block, uint8_t* values) {
    switch (code) {
        case PST_C_IQ3_S: return iq3_s(block, values);
        case PST_C_IQ3_XXS: return iq3_xxs(block, values);
        case PST_C_IQ2_S: return iq2_s(block, values);
        case PST_C_IQ2_XS: return iq2_xs(block, values);
        case PST_C_IQ2_XXS: return iq2_xxs(block, values);
        case PST_C_IQ1_S: return iq1_s(block, values);
        case PST_C_IQ1_M: return iq1_m(block, values);
        default: return tq1_0(block, values);
    }
}

void grid_scales(int32_t code, const uint8_t* b, float* scales) {
    const float first = f16_to_f32(word(b));  // what all of them are multiplied by, in most types
    auto nibble = [](const uint8_t* from, int i) { return float(from[i / 2] >> 4 * (i % 2) & 15); };
    switch (code) {
        case PST_C_IQ3_S:
            for (int g = 0; g < 8; g++) scales[g] = first * (1.0f + 2.0f * nibble(b + 106, g));
            return;
        case PST_C_IQ3_XXS:
            for (int g = 0; g < 8; g++) scales[g] = first * (0.5f + float(b[66 + 4 * g + 3] >> 4)) * 0.5f;
            return;
        case PST_C_IQ2_S:
        case PST_C_IQ2_XS:
            for (int i = 0; i < 16; i++)
                scales[i] = first * (0.5f + nibble(b + (code == PST_C_IQ2_S ? 74 : 66), i)) * 0.25f;
            return;
        case PST_C_IQ2_XXS:
            for (int g = 0; g < 8; g++) scales[g] = first * (0.5f + float(b[2 + 8 * g + 7] >> 4)) * 0.25f;
            return;
        case PST_C_IQ1_S:
            for (int g = 0; g < 8; g++) scales[g] = first * 0.125f * float(2 * (b[35 + 2 * g] >> 4 & 7) + 1);
            return;
        case PST_C_IQ1_M: {
            uint16_t bits = 0;
            for (int i = 0; i < 4; i++) bits = uint16_t(bits | (word(b + 48 + 2 * i) >> 12) << 4 * i);
            const float d = f16_to_f32(bits) * 0.125f;
            for (int i = 0; i < 16; i++) scales[i] = d * float(2 * (word(b + 48 + i / 4 * 2) >> 3 * (i % 4) & 7) + 1);
            return;
        }
        default: scales[0] = f16_to_f32(word(b + 52));
    }
}

}  // namespace pst
