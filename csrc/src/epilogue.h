// What happens to the sums of a tile on their way into a register.
#pragma once

#include "activation.h"
#include "kernels.h"
#include "simd.h"

namespace pst {

struct Epilogue {
    enum Kind { PLAIN = 0, ACTIVATED = 1, GATED = 2, PAIRED = 3 };

    int kind = PLAIN;
    int activation = 0;
    float limit = 0.0f;
    float factor = 1.0f;
    bool residual = false;

    // Outputs that a panel has.
    int width() const { return kind == GATED ? PANEL / 2 : PANEL; }

    // One row's 64 sums, `bias` [64] or null, to the first `columns` of `out`; `in` is what they are added to.
    void row(const float* sums, const float* bias, const float* in, float* out, int columns) const {
        int last = columns < width() ? columns : width();
        for (int j = 0; j < last; j += LANES) {
            F y = biased(sums, bias, j);
            if (kind == GATED) y = activate_gated(y, biased(sums, bias, j + PANEL / 2), activation, limit);
            else if (kind == ACTIVATED) y = activate(y, activation);
            if (last - j >= LANES) store(out + j, finish(y, residual ? load(in + j) : all(0.0f)));
            else store(out + j, finish(y, residual ? load(in + j, last - j) : all(0.0f)), last - j);
        }
    }

  private:
    static F biased(const float* sums, const float* bias, int j) {
        return bias ? load(sums + j) + load(bias + j) : load(sums + j);
    }
    F finish(F y, F in) const { return residual ? fma(all(factor), y, in) : all(factor) * y; }
};

}  // namespace pst
