// Codes of PST_M_BLOCK as floats in registers: inputs 4 L + 2 P and the next one of a unit, of 16 outputs.
//
// `floats` gives the two by themselves, `pairs` both as bfloat16, where they are such. Offsets are taken out.
#pragma once

#include "block_codes.h"

namespace pst {

struct TwoFloats {
    F even, odd;
};

// Any whole numbers.
template <class Code>
struct Whole {
    static constexpr int BYTES = Code::BYTES;
    Code code;
    F offset;
    explicit Whole(const BlockShape& s) : code(s), offset(byte_offset(float(widened_offset(s)))) {}
    template <int L, int P> TwoFloats floats(const uint8_t* unit) const {
        const I line = code.template line<L>(unit);
        return {byte_value<2 * P>(line, offset), byte_value<2 * P + 1>(line, offset)};
    }
    template <int L, int P> I pairs(const uint8_t* unit) const {
        const TwoFloats two = floats<L, P>(unit);
#if defined(__AVX512F__)
        const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
        return {_mm512_mask_shuffle_epi8(as_ints(two.odd).v, 0x3333333333333333, as_ints(two.even).v, upper)};
#else
        return pairs_of(two.even, two.odd);
#endif
    }
};

// Bits of e4m3.
struct SmallFloats : Code8 {
    using Code8::Code8;
    template <int L, int P> TwoFloats floats(const uint8_t* unit) const {
        const I line = Code8::line<L>(unit);
        return {e4m3_value<2 * P>(line), e4m3_value<2 * P + 1>(line)};
    }
    template <int L, int P> I pairs(const uint8_t* unit) const {
#if defined(__AVX512F__)
        // In words: exponent and mantissa where bfloat16 has them, 120 more. What has no exponent is looked up.
        const __m512i bytes = P ? _mm512_set4_epi32(int(0x800f800e), int(0x800b800a), int(0x80078006), int(0x80038002))
                                : _mm512_set4_epi32(int(0x800d800c), int(0x80098008), int(0x80058004), int(0x80018000));
        const __m512i tiny = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
        const __m512i words = _mm512_shuffle_epi8(Code8::line<L>(unit).v, bytes);
        const __m512i size = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x07f0));
        __m512i value = _mm512_add_epi16(size, _mm512_set1_epi16(0x3c00));
        value = _mm512_mask_permutexvar_epi16(value, _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78)), words, tiny);
        return {_mm512_ternarylogic_epi32(value, _mm512_slli_epi16(words, 8), _mm512_set1_epi16(-0x8000), 0xf8)};
#else
        const TwoFloats two = floats<L, P>(unit);
        return pairs_of(two.even, two.odd);
#endif
    }
};

// Indices of four bits into a table of floats.
struct TableFloats : Code4 {
    F table;
    explicit TableFloats(const BlockShape& s) : Code4(s), table(load(s.table)) {}
    template <int L, int P> TwoFloats floats(const uint8_t* unit) const {
        const uint8_t* at = unit + L / 2 * PANEL_LINE;
        constexpr int BIT = 16 * P + 4 * (L % 2);
        const I line = load_line(at);
        return {looked_up16(table, shifted<-BIT>(line)), looked_up16(table, shifted<-BIT - 8>(line))};
    }
};

#if defined(__AVX512F__)
// Indices of four bits whose values are whole: codes with an offset, or of a table.
struct Nibbles : Code4 {
    __m512i table;
    explicit Nibbles(const BlockShape& s) : Code4(s) {
        uint16_t values[32];
        for (int i = 0; i < 32; i++)
            values[i] = f32_to_bf16(s.code == PST_C_T4 ? s.table[i & 15] : float((i & 15) - s.offset));
        table = _mm512_loadu_si512(values);
    }
    template <int L, int P> I pairs(const uint8_t* unit) const {
        const __m512i bytes = P ? _mm512_set4_epi32(int(0x0f0f0e0e), 0x0b0b0a0a, 0x07070606, 0x03030202)
                                : _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000);
        const I line = shifted<-4 * (L % 2)>(load_line(unit + L / 2 * PANEL_LINE));
        return {_mm512_permutexvar_epi16(_mm512_and_si512(_mm512_shuffle_epi8(line.v, bytes), _mm512_set1_epi16(15)), table)};
    }
    template <int L, int P> TwoFloats floats(const uint8_t* unit) const {
        const I both = pairs<L, P>(unit);
        return {as_floats(shifted<16>(both)), as_floats(bits32<0xffff0000u>(both))};
    }
};
#endif

}  // namespace pst
