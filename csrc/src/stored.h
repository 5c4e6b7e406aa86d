// Rows of numbers as planes hold them.
#pragma once

#include "cache.h"
#include "simd.h"

namespace pst {

// Sixteen numbers of 8 bits, without their scale.
inline F load_s8(const uint8_t* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
#elif defined(__AVX2__)
    auto half = [](const uint8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
    };
    return {half(p), half(p + 8)};
#elif defined(__aarch64__)
    const int8x16_t bytes = vld1q_s8(reinterpret_cast<const int8_t*>(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
#else
    F out;
    for (int i = 0; i < LANES; i++) out.v[i] = float(int8_t(p[i]));
    return out;
#endif
}

// Numbers at .. of a stored row of n as float32, zeros behind its end.
__attribute__((always_inline)) inline F load_row(const uint8_t* row, int32_t dtype, int at, int n) {
    int rest = n - at;
    const uint8_t* p = row + int64_t(at) * item_bytes(dtype);
    alignas(64) uint8_t tail[64] = {};
    if (rest < LANES) {
        std::memcpy(tail, p, size_t(rest) * size_t(item_bytes(dtype)));
        p = tail;
    }
    if (dtype == PST_F32) return load(reinterpret_cast<const float*>(p));
    if (dtype == PST_I8) return load_s8(p);
    auto* half = reinterpret_cast<const uint16_t*>(p);
    return dtype == PST_F16 ? load_f16(half) : load_bf16(half);
}

// To the nearest, ties to even; a half that is too large becomes infinity.
inline void narrow(const float* x, int n, int32_t dtype, uint8_t* out) {
    if (dtype == PST_F32) {
        std::memcpy(out, x, size_t(n) * 4);
        return;
    }
    auto* half = reinterpret_cast<uint16_t*>(out);
    int i = 0;
    if (dtype == PST_F16) {
        for (; i + LANES <= n; i += LANES) store_f16(half + i, load(x + i));
        for (; i < n; i++) half[i] = f32_to_f16(x[i]);
    } else {
        for (; i + LANES <= n; i += LANES) store_bf16(half + i, load(x + i));
        for (; i < n; i++) half[i] = f32_to_bf16(x[i]);
    }
}

}  // namespace pst
