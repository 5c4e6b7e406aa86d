// Probabilities as whole numbers.
//
// The weight of a token is 2^((logit - peak) * scale), rounded to a multiple of 2^-42 and kept as that many units. Sums
// of whole numbers are exact, so no order of addition, number of threads or way of selecting can show in a result. The
// steps below, each rounded once, are those of penstock.ops.draw_weights, which gives the same numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace pst {

constexpr int UNIT_BITS = 42;
constexpr uint64_t UNIT = uint64_t(1) << UNIT_BITS;
constexpr double LOWEST = -64.0;  // everything below weighs 0, long before
// 2^f = 1 + f * P(f) for f in -0.5 ... 0.5: P interpolates at the nine Chebyshev nodes; relative error below 4e-14. Even
// and odd powers by themselves, so that neither waits for the other.
constexpr double EVEN[5] = {0x1.62e42fefa39efp-1, 0x1.c6b08d7047e52p-5, 0x1.5d87fe86fe88ep-10,
                            0x1.ffcb9515a8016p-17, 0x1.b63880a30e9ffp-24};
constexpr double ODD[4] = {0x1.ebfbdff823cedp-3, 0x1.3b2ab7181b755p-7,
                           0x1.4308ac85aa947p-13, 0x1.63d136366db24p-20};

#if defined(__AVX512F__)
constexpr int WIDE = 8;
#elif defined(__AVX2__)
constexpr int WIDE = 4;
#else
constexpr int WIDE = 2;
#endif
typedef float Floats __attribute__((vector_size(WIDE * 4)));
typedef double Doubles __attribute__((vector_size(WIDE * 8)));
typedef int64_t Whole __attribute__((vector_size(WIDE * 8)));

// Units of the WIDE tokens from `x` on.
__attribute__((always_inline)) inline Whole weigh(const float* x, double peak, double scale) {
    const double rounder = 0x1.8p52, counter = 0x1p52;
    Floats logits;
    std::memcpy(&logits, x, sizeof logits);
    Doubles y = (__builtin_convertvector(logits, Doubles) - peak) * scale;
    Doubles lowest = LOWEST - Doubles{};
    y = y > lowest ? y : lowest;
    // Adding 1.5 * 2^52 rounds to a whole number, ties to even, whose last bits are those of the sum.
    Doubles shifted = y + rounder;
    Doubles f = y - (shifted - rounder);
    Doubles square = f * f, even = square * EVEN[4] + EVEN[3], odd = square * ODD[3] + ODD[2];
    even = even * square + EVEN[2];
    odd = odd * square + ODD[1];
    even = even * square + EVEN[1];
    odd = odd * square + ODD[0];
    even = even * square + EVEN[0];
    Doubles p = (even + odd * f) * f + 1.0;
    Doubles scaled = (Doubles)((Whole)p + (((Whole)shifted + UNIT_BITS) << 52));
    return (Whole)(scaled + counter) - (Whole)(counter - Doubles{});
}

// The same of one token.
inline uint64_t weigh_one(float x, double peak, double scale) {
    float all[WIDE];
    for (float& each : all) each = x;
    return uint64_t(weigh(all, peak, scale)[0]);
}

}  // namespace pst
