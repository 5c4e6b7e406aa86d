// Sixteen lanes of 32 bits, as integers or as 4 bytes each: integer weights are multiplied and widened with it.
//
// A line is 64 bytes of weights, 4 bytes of each of 16 outputs (block.h).
#pragma once

#include "simd.h"

namespace pst {

#if defined(__AVX512F__)

struct I { __m512i v; };
inline I load_line(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline I every(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Whole numbers of -128 ... 127, one byte each.
inline void store_s8(uint8_t* p, F x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v))); }

template <int LEFT> inline I shifted(I a) {  // lanes of 32 bits
    if constexpr (LEFT > 0) return {_mm512_slli_epi32(a.v, LEFT)};
    else if constexpr (LEFT < 0) return {_mm512_srli_epi32(a.v, -LEFT)};
    else return a;
}
template <int MASK> inline I masked(I a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(MASK))}; }
inline I either(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
// In a register from now on: gcc 12 loads a line anew for every product otherwise.
inline void keep(I& a) { asm("" : "+v"(a.v)); }
inline void store_line(uint8_t* p, I a) { _mm512_storeu_si512(p, a.v); }
inline I four_times(const uint8_t* p) { return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))}; }
inline I looked_up(I table, I nibbles) { return {_mm512_shuffle_epi8(table.v, nibbles.v)}; }
// By the lowest four bits of each lane.
inline F looked_up16(F table, I lanes) { return {_mm512_permutexvar_ps(lanes.v, table.v)}; }
inline I load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline F as_floats(I a) { return {_mm512_castsi512_ps(a.v)}; }
inline I as_ints(F a) { return {_mm512_castps_si512(a.v)}; }
template <uint32_t MASK> inline I bits32(I a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(int(MASK)))}; }
inline I times(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline F load_u8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline F load_i8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline F load_e4m3(const uint8_t* p) {
    const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), size = _mm512_and_si512(bits, _mm512_set1_epi32(127));
    // The exponent is 120 less than a float's; what is below its normal numbers counts as such.
    __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(size, 20)), _mm512_set1_ps(0x1p120f));
    value = _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(127)), value, _mm512_set1_ps(__builtin_nanf("")));
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), _mm512_slli_epi32(_mm512_srli_epi32(bits, 7), 31)))};
}
inline F load_e8m0(const uint8_t* p) {
    const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    // 2^-127 is below the normal numbers; 255 is a NaN.
    __m512i value = _mm512_slli_epi32(bits, 23);
    value = _mm512_mask_blend_epi32(_mm512_testn_epi32_mask(bits, bits), value, _mm512_set1_epi32(0x00400000));
    value = _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(bits, _mm512_set1_epi32(255)), value, _mm512_set1_epi32(0x7fc00000));
    return {_mm512_castsi512_ps(value)};
}
template <int SHIFT> inline F load_nibbles(const uint8_t* p) {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(wide, SHIFT), _mm512_set1_epi32(15)))};
}

// Bytes 0 ... 255 (dot_u8), 0 ... 127 (dot_u7) times s8.
#if defined(__AVX512VNNI__)
// By hand: compilers (gcc 12) copy 24 sums around in every turn of the loop, and to the stack, for the intrinsic.
inline void dot_u8(I& sum, I w, I x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v)); }
inline void dot_u7(I& sum, I w, I x) { dot_u8(sum, w, x); }
#else
// Sums of 16 bits as sums of 32.
inline void add_pairs(I& sum, I pairs) {
    sum = {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs.v, _mm512_set1_epi16(1)))};
}
inline void dot_u7(I& sum, I w, I x) { add_pairs(sum, {_mm512_maddubs_epi16(w.v, x.v)}); }
// Two products of 255 do not fit 16 bits: even and odd bytes by themselves, as words.
inline void dot_u8(I& sum, I w, I x) {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(x.v, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(x.v, 8));
    sum = {_mm512_add_epi32(sum.v, _mm512_add_epi32(even, odd))};
}
using Sums16 = I;
inline Sums16 no_sums() { return every(0); }
inline void add_dot16(I& sum, I w, I x) { sum = {_mm512_add_epi16(sum.v, _mm512_maddubs_epi16(w.v, x.v))}; }
// -127 ... 127: |x| * (w with the sign of x). Two such products fit 16 bits.
inline void dot_s8(I& sum, I w, I x) {
    __m512i turned = _mm512_mask_sub_epi8(w.v, _mm512_movepi8_mask(x.v), _mm512_setzero_si512(), w.v);
    add_pairs(sum, {_mm512_maddubs_epi16(_mm512_abs_epi8(x.v), turned)});
}
// n bytes (a multiple of 64) less 128. False if one of them is -128 now.
inline bool less_128(const uint8_t* from, int64_t n, uint8_t* to) {
    __mmask64 lowest = 0;
    for (int64_t i = 0; i < n; i += 64) {
        const __m512i bytes = _mm512_loadu_si512(from + i);
        lowest |= _mm512_testn_epi8_mask(bytes, bytes);
        _mm512_storeu_si512(to + i, _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)));
    }
    return !lowest;
}
#endif

inline void add_product(F& sum, F w, F x) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v)); }

// Byte J of each lane minus an offset (byte_offset). Below the bits of 2^23 a byte is 2^23 plus itself.
inline F byte_offset(float offset) { return {_mm512_set1_ps(8388608.0f + offset)}; }
template <int J> inline F byte_value(I line, F offset) {
    const __m512i magic = _mm512_set1_epi32(0x4b000000);
    __m512i sum = _mm512_mask_shuffle_epi8(magic, 0x1111111111111111, line.v,
                                           _mm512_add_epi32(_mm512_set4_epi32(12, 8, 4, 0), _mm512_set1_epi32(J)));
    return {_mm512_sub_ps(_mm512_castsi512_ps(sum), offset.v)};
}
#if defined(PST_BF16_PAIRS)
inline void dot_bf16(F& sum, I w, I x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v)); }
#endif

#elif defined(__AVX2__)

struct I { __m256i lo, hi; };
inline I load_line(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline I every(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline void store_s8(uint8_t* p, F x) {
    __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
    pairs = _mm256_permute4x64_epi64(pairs, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
// By hand: with the intrinsic, gcc 12 keeps sums on the stack and stores them in every turn of the loop.
inline void add32(__m256i& sum, __m256i x) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }
// Sums of 16 bits as sums of 32.
inline void add_pairs(I& sum, I pairs) {
    add32(sum.lo, _mm256_madd_epi16(pairs.lo, _mm256_set1_epi16(1)));
    add32(sum.hi, _mm256_madd_epi16(pairs.hi, _mm256_set1_epi16(1)));
}
template <int LEFT> inline __m256i shifted(__m256i a) {
    if constexpr (LEFT > 0) return _mm256_slli_epi32(a, LEFT);
    else if constexpr (LEFT < 0) return _mm256_srli_epi32(a, -LEFT);
    else return a;
}
template <int LEFT> inline I shifted(I a) { return {shifted<LEFT>(a.lo), shifted<LEFT>(a.hi)}; }
template <int MASK> inline I masked(I a) {
    const __m256i mask = _mm256_set1_epi8(MASK);
    return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline I either(I a, I b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline void keep(I& a) { asm("" : "+x"(a.lo), "+x"(a.hi)); }
inline void store_line(uint8_t* p, I a) {
    _mm256_storeu_si256((__m256i*)p, a.lo);
    _mm256_storeu_si256((__m256i*)(p + 32), a.hi);
}
inline I four_times(const uint8_t* p) {
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return {twice, twice};
}
inline I looked_up(I table, I nibbles) {
    return {_mm256_shuffle_epi8(table.lo, nibbles.lo), _mm256_shuffle_epi8(table.hi, nibbles.hi)};
}
// By the lowest four bits of each lane.
inline __m256 looked_up16(F table, __m256i lanes) {
    const __m256 low = _mm256_permutevar8x32_ps(table.lo, lanes), high = _mm256_permutevar8x32_ps(table.hi, lanes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28)));
}
inline F looked_up16(F table, I lanes) { return {looked_up16(table, lanes.lo), looked_up16(table, lanes.hi)}; }
inline I load_ints(const int32_t* p) { return load_line((const uint8_t*)p); }
inline F as_floats(I a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline I as_ints(F a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
template <uint32_t MASK> inline I bits32(I a) {
    const __m256i mask = _mm256_set1_epi32(int(MASK));
    return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline I times(I a, I b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline I wide_bytes(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline F load_u8(const uint8_t* p) { return to_float(wide_bytes(p)); }
inline F load_i8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
template <int SHIFT> inline F load_nibbles(const uint8_t* p) {
    const __m256i mask = _mm256_set1_epi32(15);
    I wide = shifted<-SHIFT>(wide_bytes(p));
    return to_float({_mm256_and_si256(wide.lo, mask), _mm256_and_si256(wide.hi, mask)});
}
inline void dot_u7(I& sum, I w, I x) {  // x is the same in all lanes
    add_pairs(sum, {_mm256_maddubs_epi16(w.lo, x.lo), _mm256_maddubs_epi16(w.hi, x.lo)});
}
// Two products of 255 do not fit 16 bits: even and odd bytes by themselves, as words.
inline void dot_u8(I& sum, I w, I x) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x.lo, 8), 8), odd = _mm256_srai_epi16(x.lo, 8);
    const __m256i low = _mm256_set1_epi16(255);
    add32(sum.lo, _mm256_madd_epi16(_mm256_and_si256(w.lo, low), even));
    add32(sum.hi, _mm256_madd_epi16(_mm256_and_si256(w.hi, low), even));
    add32(sum.lo, _mm256_madd_epi16(_mm256_srli_epi16(w.lo, 8), odd));
    add32(sum.hi, _mm256_madd_epi16(_mm256_srli_epi16(w.hi, 8), odd));
}
using Sums16 = I;
inline Sums16 no_sums() { return every(0); }
inline void add_dot16(I& sum, I w, I x) {
    const __m256i lo = _mm256_maddubs_epi16(w.lo, x.lo), hi = _mm256_maddubs_epi16(w.hi, x.lo);
    asm("vpaddw %1, %0, %0" : "+x"(sum.lo) : "x"(lo));
    asm("vpaddw %1, %0, %0" : "+x"(sum.hi) : "x"(hi));
}
// -127 ... 127: |x| * (w with the sign of x). Two such products fit 16 bits.
inline void dot_s8(I& sum, I w, I x) {
    const __m256i size = _mm256_abs_epi8(x.lo);
    add_pairs(sum, {_mm256_maddubs_epi16(size, _mm256_sign_epi8(w.lo, x.lo)),
                    _mm256_maddubs_epi16(size, _mm256_sign_epi8(w.hi, x.lo))});
}
// n bytes (a multiple of 64) less 128. False if one of them is -128 now.
inline bool less_128(const uint8_t* from, int64_t n, uint8_t* to) {
    __m256i lowest = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 32) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(from + i));
        lowest = _mm256_or_si256(lowest, _mm256_cmpeq_epi8(bytes, _mm256_setzero_si256()));
        _mm256_storeu_si256((__m256i*)(to + i), _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)));
    }
    return _mm256_testz_si256(lowest, lowest);
}
inline F byte_offset(float offset) { return all(offset); }
template <int J> inline F byte_value(I line, F offset) {
    const __m256i mask = _mm256_set1_epi32(255);
    return {_mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(line.lo, 8 * J), mask)), offset.lo),
            _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(line.hi, 8 * J), mask)), offset.hi)};
}

#elif defined(__aarch64__)

struct I { uint32x4_t v[4]; };
inline uint8x16_t bytes_of(uint32x4_t a) { return vreinterpretq_u8_u32(a); }
inline int8x16_t signed_bytes(uint32x4_t a) { return vreinterpretq_s8_u32(a); }
inline uint32x4_t less_128(uint32x4_t a) { return veorq_u32(a, vdupq_n_u32(0x80808080u)); }
inline I load_line(const uint8_t* p) { PST_FOUR(I, vreinterpretq_u32_u8(vld1q_u8(p + 16 * i))); }
inline I every(int32_t x) {
    const uint32x4_t lanes = vdupq_n_u32(uint32_t(x));
    return {lanes, lanes, lanes, lanes};
}
inline F to_float(I a) { PST_FOUR(F, vcvtq_f32_s32(vreinterpretq_s32_u32(a.v[i]))); }
inline void store_s8(uint8_t* p, F x) {
    auto narrow = [](float32x4_t v) { return vmovn_s32(vcvtnq_s32_f32(v)); };
    const int8x8_t low = vmovn_s16(vcombine_s16(narrow(x.v[0]), narrow(x.v[1])));
    vst1q_u8(p, vreinterpretq_u8_s8(vcombine_s8(low, vmovn_s16(vcombine_s16(narrow(x.v[2]), narrow(x.v[3]))))));
}
template <int LEFT> inline uint32x4_t shifted(uint32x4_t a) {
    if constexpr (LEFT > 0) return vshlq_n_u32(a, LEFT);
    else if constexpr (LEFT < 0) return vshrq_n_u32(a, -LEFT);
    else return a;
}
template <int LEFT> inline I shifted(I a) { PST_FOUR(I, shifted<LEFT>(a.v[i])); }
template <uint32_t MASK> inline I bits32(I a) { PST_FOUR(I, vandq_u32(a.v[i], vdupq_n_u32(MASK))); }
template <int MASK> inline I masked(I a) { return bits32<uint32_t(MASK) * 0x01010101u>(a); }
inline I either(I a, I b) { PST_FOUR(I, vorrq_u32(a.v[i], b.v[i])); }
inline void keep(I& a) { asm("" : "+w"(a.v[0]), "+w"(a.v[1]), "+w"(a.v[2]), "+w"(a.v[3])); }
inline void store_line(uint8_t* p, I a) {
    vst1q_u8(p, bytes_of(a.v[0]));
    vst1q_u8(p + 16, bytes_of(a.v[1]));
    vst1q_u8(p + 32, bytes_of(a.v[2]));
    vst1q_u8(p + 48, bytes_of(a.v[3]));
}
inline I four_times(const uint8_t* p) {
    const uint32x4_t once = vreinterpretq_u32_u8(vld1q_u8(p));
    return {once, once, once, once};
}
inline I looked_up(I table, I nibbles) {
    PST_FOUR(I, vreinterpretq_u32_u8(vqtbl1q_u8(bytes_of(table.v[i]), bytes_of(nibbles.v[i]))));
}
// By the lowest four bits of each lane: its four bytes are looked up among 64.
inline F looked_up16(F table, I lanes) {
    const uint8x16x4_t bytes = {{vreinterpretq_u8_f32(table.v[0]), vreinterpretq_u8_f32(table.v[1]),
                                 vreinterpretq_u8_f32(table.v[2]), vreinterpretq_u8_f32(table.v[3])}};
    const uint32x4_t low = vdupq_n_u32(15), times4 = vdupq_n_u32(0x04040404u), first = vdupq_n_u32(0x03020100u);
    PST_FOUR(F, vreinterpretq_f32_u8(vqtbl4q_u8(bytes, bytes_of(vmlaq_u32(first, vandq_u32(lanes.v[i], low), times4)))));
}
inline I load_ints(const int32_t* p) { return load_line((const uint8_t*)p); }
inline F as_floats(I a) { PST_FOUR(F, vreinterpretq_f32_u32(a.v[i])); }
inline I as_ints(F a) { PST_FOUR(I, vreinterpretq_u32_f32(a.v[i])); }
inline I times(I a, I b) { PST_FOUR(I, vmulq_u32(a.v[i], b.v[i])); }
inline F wide(uint8x16_t bytes) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return to_float({vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)});
}
inline F load_u8(const uint8_t* p) { return wide(vld1q_u8(p)); }
inline F load_i8(const uint8_t* p) { return wide(veorq_u8(vld1q_u8(p), vdupq_n_u8(128))) - all(128.0f); }
template <int SHIFT> inline F load_nibbles(const uint8_t* p) {
    return wide(vandq_u8(bytes_of(shifted<-SHIFT>(vreinterpretq_u32_u8(vld1q_u8(p)))), vdupq_n_u8(15)));
}
// Bytes -128 ... 127 times -127 ... 127; x is the same in all lanes.
inline void dot_s8(I& sum, I w, I x) {
    sum = four<I>([&](int i) __attribute__((always_inline)) {
        const int8x16_t a = signed_bytes(w.v[i]), b = signed_bytes(x.v[0]);
        const int32x4_t s = vreinterpretq_s32_u32(sum.v[i]);
#if defined(__ARM_FEATURE_DOTPROD)
        return vreinterpretq_u32_s32(vdotq_s32(s, a, b));
#else
        // Two such products fit 16 bits.
        const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
        return vreinterpretq_u32_s32(vpadalq_s16(s, vpaddq_s16(low, high)));
#endif
    });
}
inline void dot_u7(I& sum, I w, I x) { dot_s8(sum, w, x); }
#if defined(__ARM_FEATURE_MATMUL_INT8)
inline void dot_u8(I& sum, I w, I x) {
    sum = four<I>([&](int i) __attribute__((always_inline)) {
        return vreinterpretq_u32_s32(vusdotq_s32(vreinterpretq_s32_u32(sum.v[i]), bytes_of(w.v[i]), signed_bytes(x.v[0])));
    });
}
#else
// As signed bytes, and 128 times what they are multiplied by: two of that fit 16 bits.
inline void dot_u8(I& sum, I w, I x) {
    const int16x8_t more = vshlq_n_s16(vpaddlq_s8(signed_bytes(x.v[0])), 7);
    const I start = four<I>([&](int i) __attribute__((always_inline)) {
        return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum.v[i]), more));
    });
    sum = start;
    dot_s8(sum, four<I>([&](int i) __attribute__((always_inline)) { return less_128(w.v[i]); }), x);
}
// Sums of 16 bits, each of every fourth product.
struct Sums16 { int16x8_t v[8]; };
inline Sums16 no_sums() {
    const int16x8_t zero = vdupq_n_s16(0);
    return {zero, zero, zero, zero, zero, zero, zero, zero};
}
template <int PART> inline void add_dot16(Sums16& sum, I w, I x) {
    const int8x16_t a = signed_bytes(w.v[PART]), b = signed_bytes(x.v[0]);
    sum.v[2 * PART] = vmlal_s8(sum.v[2 * PART], vget_low_s8(a), vget_low_s8(b));
    sum.v[2 * PART + 1] = vmlal_high_s8(sum.v[2 * PART + 1], a, b);
}
inline void add_dot16(Sums16& sum, I w, I x) {
    add_dot16<0>(sum, w, x);
    add_dot16<1>(sum, w, x);
    add_dot16<2>(sum, w, x);
    add_dot16<3>(sum, w, x);
}
inline void add_pairs(I& sum, const Sums16& s) {
    sum = four<I>([&](int i) __attribute__((always_inline)) {
        return vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(sum.v[i]), vpaddq_s16(s.v[2 * i], s.v[2 * i + 1])));
    });
}
// n bytes (a multiple of 64) less 128. Products of -128 fit here.
inline bool less_128(const uint8_t* from, int64_t n, uint8_t* to) {
    for (int64_t i = 0; i < n; i += 16) vst1q_u8(to + i, veorq_u8(vld1q_u8(from + i), vdupq_n_u8(128)));
    return true;
}
#endif
#if defined(PST_BF16_PAIRS)
inline void dot_bf16(F& sum, I w, I x) { sum = dot_pairs(sum, as_floats(x), as_floats(w)); }
#endif
inline F byte_offset(float offset) { return all(offset); }
template <int J> inline F byte_value(I line, F offset) {
    const uint32x4_t mask = vdupq_n_u32(255);
    PST_FOUR(F, vsubq_f32(vcvtq_f32_u32(vandq_u32(shifted<-8 * J>(line.v[i]), mask)), offset.v[i]));
}

#else

struct I { uint32_t v[16]; };
inline I load_line(const uint8_t* p) { I r; std::memcpy(r.v, p, 64); return r; }
#define PST_EACH(type, expr) type r; for (int i = 0; i < 16; i++) r.v[i] = (expr); return r
inline I every(int32_t x) { PST_EACH(I, uint32_t(x)); }
inline F to_float(I a) { PST_EACH(F, float(int32_t(a.v[i]))); }
inline void store_s8(uint8_t* p, F x) {
    for (int i = 0; i < 16; i++) p[i] = uint8_t(int8_t(x.v[i]));
}
// Unsigned, so that partial sums may wrap around on their way to one that fits, as they do in vectors.
inline uint32_t dot_bytes(uint32_t sum, uint32_t w, uint32_t x) {
    for (int b = 0; b < 32; b += 8) sum += uint32_t(int32_t((w >> b) & 255) * int8_t(x >> b));
    return sum;
}
inline void dot_u8(I& sum, I w, I x) {
    for (int i = 0; i < 16; i++) sum.v[i] = dot_bytes(sum.v[i], w.v[i], x.v[i]);
}
inline void dot_u7(I& sum, I w, I x) { dot_u8(sum, w, x); }
template <int LEFT> inline I shifted(I a) { PST_EACH(I, LEFT > 0 ? a.v[i] << (LEFT & 31) : a.v[i] >> (-LEFT & 31)); }
template <int MASK> inline I masked(I a) { PST_EACH(I, a.v[i] & uint32_t(MASK) * 0x01010101u); }
inline I either(I a, I b) { PST_EACH(I, a.v[i] | b.v[i]); }
inline void keep(I&) {}
inline void store_line(uint8_t* p, I a) { std::memcpy(p, a.v, 64); }
inline I four_times(const uint8_t* p) {
    I r;
    for (int i = 0; i < 16; i += 4) std::memcpy(r.v + i, p, 16);
    return r;
}
inline I looked_up(I table, I nibbles) {
    I r;
    auto* out = reinterpret_cast<uint8_t*>(r.v);
    auto *values = reinterpret_cast<const uint8_t*>(table.v), *at = reinterpret_cast<const uint8_t*>(nibbles.v);
    for (int i = 0; i < 64; i++) out[i] = values[at[i]];
    return r;
}
inline F looked_up16(F table, I lanes) { PST_EACH(F, table.v[lanes.v[i] & 15]); }
inline I load_ints(const int32_t* p) { return load_line(reinterpret_cast<const uint8_t*>(p)); }
inline F as_floats(I a) {
    F r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
inline I as_ints(F a) {
    I r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
template <uint32_t MASK> inline I bits32(I a) { PST_EACH(I, a.v[i] & MASK); }
inline I times(I a, I b) { PST_EACH(I, a.v[i] * b.v[i]); }
inline F load_u8(const uint8_t* p) { PST_EACH(F, float(p[i])); }
inline F load_i8(const uint8_t* p) { PST_EACH(F, float(int8_t(p[i]))); }
template <int SHIFT> inline F load_nibbles(const uint8_t* p) { PST_EACH(F, float(p[i] >> SHIFT & 15)); }
inline F byte_offset(float offset) { return all(offset); }
template <int J> inline F byte_value(I line, F offset) {
    PST_EACH(F, float(int32_t((line.v[i] >> (8 * J)) & 255)) - offset.v[i]);
}
#undef PST_EACH

#endif

#if !defined(__AVX512F__)
inline F load_e4m3(const uint8_t* p) {
    float out[LANES];
    for (int i = 0; i < LANES; i++) out[i] = e4m3_to_f32(p[i]);
    return load(out);
}
inline F load_e8m0(const uint8_t* p) {
    float out[LANES];
    for (int i = 0; i < LANES; i++) out[i] = e8m0_to_f32(p[i]);
    return load(out);
}
inline void add_product(F& sum, F w, F x) { sum = fma(w, x, sum); }
#endif

// A float whose bits are those of e4m3 where its own are, but for an exponent that is 120 less: NaN is 480.
template <int J> inline F e4m3_value(I line) {
    const I top = shifted<24 - 8 * J>(line);  // the byte's bits are the uppermost
    return as_floats(either(bits32<0x80000000u>(top), bits32<0x07f00000u>(shifted<-4>(top)))) * all(0x1p120f);
}
// Pairs of bfloat16 of floats that are such.
inline I pairs_of(F even, F odd) { return either(shifted<-16>(as_ints(even)), bits32<0xffff0000u>(as_ints(odd))); }

}  // namespace pst
