// Sixteen floats at a time, the same on every instruction set: F is one zmm, two ymm, four registers of NEON, or what the
// compiler makes of it.
//
// Sums are always one fused multiply-add after the other per lane, and horizontal sums one fixed tree, so code written
// with these functions gives the same bits on every set that has fused multiply-add. The base set rounds twice.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Products of pairs of bfloat16, and vectors in which turning codes costs less than reading them.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PST_BF16_PAIRS
#endif
#if defined(__AVX2__) || defined(__aarch64__)
#define PST_VECTORS
#endif

namespace pst {

constexpr int LANES = 16;

inline float bf16_to_f32(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023, bits;
    if (exp == 31) bits = sign | 0x7f800000 | (man << 13);
    else if (exp) bits = sign | ((exp + 112) << 23) | (man << 13);
    else {
        float value = float(man) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// To the nearest, ties to even; too large becomes infinity.
inline uint16_t f32_to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    uint32_t mag = bits & 0x7fffffff;
    if (mag > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (mag >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (mag < 0x38800000) {  // subnormal: adding 0.5 puts the last place of a half at the last place of a float
        float magnitude, half = 0.5f;
        std::memcpy(&magnitude, &mag, 4);
        magnitude += half;
        uint32_t shifted;
        std::memcpy(&shifted, &magnitude, 4);
        return uint16_t(sign | uint16_t(shifted - 0x3f000000));
    }
    return uint16_t(sign | uint16_t((mag - 0x38000000 + 0xfff + ((mag >> 13) & 1)) >> 13));
}

// A float of 8 bits with 4 of exponent: no infinities, NaN where all others are set.
inline float e4m3_to_f32(uint8_t x) {
    const uint32_t size = x & 127;
    float value;
    const uint32_t bits = size == 127 ? 0x7fc00000u : size >= 8 ? (size << 20) + (120u << 23) : 0;
    std::memcpy(&value, &bits, 4);
    if (size < 8) value = float(size) * 0x1p-9f;
    return x & 128 ? -value : value;
}

// A power of two; 255 is a NaN.
inline float e8m0_to_f32(uint8_t x) {
    const uint32_t bits = x == 255 ? 0x7fc00000u : x ? uint32_t(x) << 23 : 0x00400000u;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#if defined(__AVX512F__)

struct F { __m512 v; };
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }
// The first n of 16 lanes; the others are zero, and not read.
inline F load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline F all(float x) { return {_mm512_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, 8)}; }  // to the nearest, ties to even
inline F scale2(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a * 2^n for whole n
inline F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_bf16(uint16_t* p, F x) {
    __m512i bits = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(up));
}
inline void store_f16(uint16_t* p, F x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, 0)); }

#elif defined(__AVX2__)

struct F { __m256 lo, hi; };
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.lo); _mm256_storeu_ps(p + 8, x.hi); }
inline F load(const float* p, int n) {
    alignas(32) float t[16] = {};
    std::memcpy(t, p, size_t(n) * 4);
    return load(t);
}
inline void store(float* p, F x, int n) {
    alignas(32) float t[16];
    store(t, x);
    std::memcpy(p, t, size_t(n) * 4);
}
inline F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F abs(F a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F round(F a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
inline __m256 scale2(__m256 a, __m256 n) {
    // 2^n in two halves, so that results below the normal numbers round once and reach zero.
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    __m256i bias = _mm256_set1_epi32(127);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline F scale2(F a, F n) { return {scale2(a.lo, n.lo), scale2(a.hi, n.hi)}; }
inline __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline F load_f16(const uint16_t* p) {
    const auto* half = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}
inline void store_bf16(uint16_t* p, F x) {
    alignas(32) float t[16];
    store(t, x);
    for (int i = 0; i < 16; i++) p[i] = f32_to_bf16(t[i]);
}
inline void store_f16(uint16_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.lo, 0));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.hi, 0));
}

#elif defined(__aarch64__)

struct F { float32x4_t v[4]; };
// By name, not in a loop: so the parts stay in registers.
template <class Out, class Of> inline __attribute__((always_inline)) Out four(Of of) { return {of(0), of(1), of(2), of(3)}; }
#define PST_FOUR(type, expr) return four<type>([&](int i) __attribute__((always_inline)) { return expr; })
inline F load(const float* p) { PST_FOUR(F, vld1q_f32(p + 4 * i)); }
inline void store(float* p, F x) {
    vst1q_f32(p, x.v[0]);
    vst1q_f32(p + 4, x.v[1]);
    vst1q_f32(p + 8, x.v[2]);
    vst1q_f32(p + 12, x.v[3]);
}
inline F load(const float* p, int n) {
    alignas(64) float t[16] = {};
    std::memcpy(t, p, size_t(n) * 4);
    return load(t);
}
inline void store(float* p, F x, int n) {
    alignas(64) float t[16];
    store(t, x);
    std::memcpy(p, t, size_t(n) * 4);
}
inline F all(float x) {
    const float32x4_t lanes = vdupq_n_f32(x);
    return {lanes, lanes, lanes, lanes};
}
inline F operator+(F a, F b) { PST_FOUR(F, vaddq_f32(a.v[i], b.v[i])); }
inline F operator-(F a, F b) { PST_FOUR(F, vsubq_f32(a.v[i], b.v[i])); }
inline F operator*(F a, F b) { PST_FOUR(F, vmulq_f32(a.v[i], b.v[i])); }
inline F operator/(F a, F b) { PST_FOUR(F, vdivq_f32(a.v[i], b.v[i])); }
inline F fma(F a, F b, F c) { PST_FOUR(F, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// As maxps: b if one is NaN. fmax would be NaN then, and fmaxnm the other one.
inline F max(F a, F b) { PST_FOUR(F, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
inline F min(F a, F b) { PST_FOUR(F, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
inline F abs(F a) { PST_FOUR(F, vabsq_f32(a.v[i])); }
inline F round(F a) { PST_FOUR(F, vrndnq_f32(a.v[i])); }
inline float32x4_t scale2(float32x4_t a, float32x4_t n) {  // in two halves, as above
    const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1), rest = vsubq_s32(whole, half);
    const int32x4_t bias = vdupq_n_s32(127);
    a = vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)));
    return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23)));
}
inline F scale2(F a, F n) { PST_FOUR(F, scale2(a.v[i], n.v[i])); }
inline F load_bf16(const uint16_t* p) { PST_FOUR(F, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
inline F load_f16(const uint16_t* p) { PST_FOUR(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
inline uint16x4_t to_bf16(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, nan), 16);
}
inline void store_bf16(uint16_t* p, F x) {
    vst1q_u16(p, vcombine_u16(to_bf16(x.v[0]), to_bf16(x.v[1])));
    vst1q_u16(p + 8, vcombine_u16(to_bf16(x.v[2]), to_bf16(x.v[3])));
}
inline void store_f16(uint16_t* p, F x) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x.v[0]), vcvt_f16_f32(x.v[1]))));
    vst1q_u16(p + 8, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x.v[2]), vcvt_f16_f32(x.v[3]))));
}
#if defined(PST_BF16_PAIRS)
// bfdot: both products of a pair and their sum with `sum`, rounded to odd; subnormal numbers count as zero.
inline F dot_pairs(F sum, F a, F b) {
    PST_FOUR(F, vbfdotq_f32(sum.v[i], vreinterpretq_bf16_f32(a.v[i]), vreinterpretq_bf16_f32(b.v[i])));
}
#endif

#else

struct F { float v[16]; };
#define PST_EACH(expr) F r; for (int i = 0; i < 16; i++) r.v[i] = (expr); return r
inline F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
inline void store(float* p, F x) { std::memcpy(p, x.v, 64); }
inline F load(const float* p, int n) { F r{}; std::memcpy(r.v, p, size_t(n) * 4); return r; }
inline void store(float* p, F x, int n) { std::memcpy(p, x.v, size_t(n) * 4); }
inline F all(float x) { PST_EACH(x); }
inline F operator+(F a, F b) { PST_EACH(a.v[i] + b.v[i]); }
inline F operator-(F a, F b) { PST_EACH(a.v[i] - b.v[i]); }
inline F operator*(F a, F b) { PST_EACH(a.v[i] * b.v[i]); }
inline F operator/(F a, F b) { PST_EACH(a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { PST_EACH(a.v[i] * b.v[i] + c.v[i]); }
inline F max(F a, F b) { PST_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }  // as maxps: b if one is NaN
inline F min(F a, F b) { PST_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(F a) { PST_EACH(std::fabs(a.v[i])); }
inline F round(F a) { PST_EACH(std::nearbyint(a.v[i])); }
inline F scale2(F a, F n) {
    F r;
    for (int i = 0; i < 16; i++) {
        float shifted = n.v[i] + 12582912.0f, low, high;  // 1.5 * 2^23: the whole number lands in the last bits
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        int32_t whole = int32_t(bits - 0x4b400000u), half = whole >> 1;
        // In two halves, as above. Of a NaN come some finite factors, and a NaN times those is one.
        uint32_t low_bits = uint32_t(half + 127) << 23, high_bits = uint32_t(whole - half + 127) << 23;
        std::memcpy(&low, &low_bits, 4);
        std::memcpy(&high, &high_bits, 4);
        r.v[i] = a.v[i] * low * high;
    }
    return r;
}
inline F load_bf16(const uint16_t* p) { PST_EACH(bf16_to_f32(p[i])); }
inline F load_f16(const uint16_t* p) { PST_EACH(f16_to_f32(p[i])); }
inline void store_bf16(uint16_t* p, F x) { for (int i = 0; i < 16; i++) p[i] = f32_to_bf16(x.v[i]); }
inline void store_f16(uint16_t* p, F x) { for (int i = 0; i < 16; i++) p[i] = f32_to_f16(x.v[i]); }
#undef PST_EACH

#endif

// The sum of 16 lanes as one fixed tree: halves onto each other, 16 -> 8 -> 4 -> 2 -> 1.
inline float sum(F x) {
    float t[16];
    store(t, x);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}

inline float largest(F x) {
    float t[16];
    store(t, x);
    float m = t[0];
    for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
    return m;
}

// e^x within 2 units of the last place for x <= 88.7, zero far below, exactly 0 at -infinity; NaN stays NaN.
inline F exp(F x) {
    const F low = all(-104.0f), high = all(88.72283f);
    x = min(high, max(low, x));  // in this order a NaN stays one
    F n = round(x * all(1.44269504f));
    F r = fma(n, all(-0.693145752f), x);
    r = fma(n, all(-1.42860677e-6f), r);
    F p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    F y = fma(p, r * r, r) + all(1.0f);
    return scale2(y, n);
}

}  // namespace pst
