// Rotation of a head: one arithmetic for what is rotated before it is kept and for what is rotated when it is read.
#pragma once

#include "simd.h"

namespace pst {

// Pairs lie `half` apart: (a, b) -> (a cos - b sin, b cos + a sin). Products and sums are rounded one by one, as the
// reference does it, so bits are those of the reference on every instruction set.
inline void turn_halves(float* a, float* b, const float* cosines, const float* sines, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        F x = load(a + i), y = load(b + i), c = load(cosines + i), s = load(sines + i);
        store(a + i, x * c - y * s);
        store(b + i, y * c + x * s);
    }
    for (; i < half; i++) {
        float x = a[i], y = b[i];
        a[i] = x * cosines[i] - y * sines[i];
        b[i] = y * cosines[i] + x * sines[i];
    }
}

// Pairs are neighbours.
inline void turn_neighbours(float* __restrict x, const float* __restrict cosines, const float* __restrict sines, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
}

inline void turn_head(float* x, const float* cosines, const float* sines, int half, bool interleaved) {
    if (interleaved) turn_neighbours(x, cosines, sines, half);
    else turn_halves(x, x + half, cosines, sines, half);
}

}  // namespace pst
