// Functions of scores. NaN stays NaN, so that a row's NaN reaches its output: max and min are their second operand if one
// of the two is NaN, and the number that may be NaN stands there.
#pragma once

#include "simd.h"

namespace pst {

// cap tanh(x / cap) as cap - 2 cap / (e^(2x / cap) + 1): wrong by some 1e-7 of the cap.
inline F soft_cap(F x, float cap) {
    F e = exp(min(all(80.0f), x * all(2.0f / cap)));
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
