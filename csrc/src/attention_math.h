// Functions of scores. Unlike those of simd.h they keep NaN, so that a row's NaN reaches its output: max and min are
// their second operand if one of the two is NaN, and the number that may be NaN stands there.
#pragma once

#include "simd.h"

namespace pst {

#if !defined(__AVX2__)
// simd.h's asks the C library, number by number, and may not be asked about NaN.
inline F scale2_any(F a, F n) {
    F r;
    for (int i = 0; i < LANES; i++) {
        float shifted = n.v[i] + 12582912.0f, low, high;  // 1.5 * 2^23: the whole number lands in the last bits
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        int32_t whole = int32_t(bits - 0x4b400000u), half = whole >> 1;
        uint32_t low_bits = uint32_t(half + 127) << 23, high_bits = uint32_t(whole - half + 127) << 23;
        std::memcpy(&low, &low_bits, 4);
        std::memcpy(&high, &high_bits, 4);
        r.v[i] = a.v[i] * low * high;
    }
    return r;
}
#else
inline F scale2_any(F a, F n) { return scale2(a, n); }
#endif

// e^x for x <= 88, within 2 units of the last place, exactly 0 at -infinity.
inline F exp_down(F x) {
    x = max(all(-110.0f), x);
    F n = round(x * all(1.44269504f));
    F r = fma(n, all(-0.693145752f), x);
    r = fma(n, all(-1.42860677e-6f), r);
    F p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    return scale2_any(fma(p, r * r, r) + all(1.0f), n);
}

// cap tanh(x / cap) as cap - 2 cap / (e^(2x / cap) + 1): wrong by some 1e-7 of the cap.
inline F soft_cap(F x, float cap) {
    F e = exp_down(min(all(80.0f), x * all(2.0f / cap)));
    return all(cap) - all(2.0f * cap) / (e + all(1.0f));
}

inline float top(F x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x.v);
#else
    return largest(x);
#endif
}

}  // namespace pst
