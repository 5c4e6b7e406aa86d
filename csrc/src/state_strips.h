// Strips of channels whose states know nothing of each other.
#pragma once

#include "state.h"

namespace pst {

constexpr int STRIP = 64, VECTORS = STRIP / LANES;  // channels that one thread takes

inline F part(const float* p, int lanes) { return lanes == LANES ? load(p) : load(p, lanes); }
inline void put(float* p, F x, int lanes) {
    if (lanes == LANES) store(p, x);
    else store(p, x, lanes);
}

// `rows` rows of a strip, as wide as the state, and as one piece of memory.
inline void take(const float* from, int64_t stride, int rows, int count, bool fresh, float* to) {
    for (int n = 0; n < rows; n++)
        for (int i = 0; i < STRIP; i += LANES) {
            int lanes = std::min(LANES, count - i);
            store(to + n * STRIP + i, fresh || lanes <= 0 ? all(0.0f) : part(from + n * stride + i, lanes));
        }
}

inline void bring_back(const float* from, int rows, int count, float* to, int64_t stride) {
    for (int n = 0; n < rows; n++)
        for (int i = 0; i < count; i += LANES)
            put(to + n * stride + i, load(from + n * STRIP + i), std::min(LANES, count - i));
}

}  // namespace pst
