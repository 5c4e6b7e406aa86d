// Norms of one row: the same additions wherever a norm is computed, by itself or before a product.
#pragma once

#include <cmath>

#include "simd.h"

namespace pst {

enum NormKind { NORM_NONE = 0, NORM_RMS = 1, NORM_LAYER = 2 };

struct Norm {
    int kind = NORM_NONE;
    float eps = 0.0f;
    const float* weight = nullptr;  // [n] or null
    const float* bias = nullptr;    // [n] or null
};

// A sum over vectors in order. Lanes add 8 numbers at a time in each of four chains; what the chains hold then goes
// into a total that remembers what its roundings lose. So the error stays below 15 roundings for every width, and the
// four chains hide the latency of an addition.
class RowSum {
  public:
    void add(F x) { chain_[count_ & 3] = chain_[count_ & 3] + x; step(); }
    void add_square(F x) { chain_[count_ & 3] = fma(x, x, chain_[count_ & 3]); step(); }
    float value() {
        fold();
        return sum(total_);
    }

  private:
    void step() {
        if (++count_ == 32) fold();
    }
    void fold() {
        F part = ((chain_[0] + chain_[1]) + (chain_[2] + chain_[3])) - lost_;
        F next = total_ + part;
        lost_ = (next - total_) - part;
        total_ = next;
        for (F& c : chain_) c = all(0.0f);
        count_ = 0;
    }

    F chain_[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
    F total_ = all(0.0f), lost_ = all(0.0f);
    int count_ = 0;
};

// f(offset, lanes) for the whole of 0 ... n-1; lanes is 16 but for the last.
template <class Function>
inline void each_vector(int n, Function f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, n - i);
}

inline F load_part(const float* p, int lanes) { return lanes == LANES ? load(p) : load(p, lanes); }
inline void store_part(float* p, F x, int lanes) {
    if (lanes == LANES) store(p, x);
    else store(p, x, lanes);
}

// x * factor * weight + bias, x of n numbers; out may be x.
inline void scale_row(const float* x, int n, float factor, const Norm& norm, float* out) {
    each_vector(n, [&](int i, int lanes) {
        F y = load_part(x + i, lanes) * all(factor);
        if (norm.weight) y = y * load_part(norm.weight + i, lanes);
        if (norm.bias) y = y + load_part(norm.bias + i, lanes);
        store_part(out + i, y, lanes);
    });
}

// The norm of x, n numbers, to `out`, which may be x.
inline void norm_row(const float* x, int n, const Norm& norm, float* out) {
    if (norm.kind == NORM_LAYER) {
        RowSum total;
        each_vector(n, [&](int i, int lanes) { total.add(load_part(x + i, lanes)); });
        F mean = all(total.value() / float(n));
        // Out first, and squares from there: lanes behind the end are zero again.
        each_vector(n, [&](int i, int lanes) { store_part(out + i, load_part(x + i, lanes) - mean, lanes); });
        x = out;
    }
    RowSum squares;
    each_vector(n, [&](int i, int lanes) { squares.add_square(load_part(x + i, lanes)); });
    scale_row(x, n, 1.0f / std::sqrt(squares.value() / float(n) + norm.eps), norm, out);
}

}  // namespace pst
