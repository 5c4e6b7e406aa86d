// The activations of enum pst_activation, sixteen numbers at a time.
//
// NaN gives NaN. An infinity gives the limit of the function (silu of -infinity is 0 to within 1e-32), so no finite
// result is lost to a quotient of infinities. max(c, x) and min(c, x) with the constant first keep a NaN: as maxps,
// they give their second argument if one is NaN.
#pragma once

#include "penstock.h"
#include "simd.h"

namespace pst {

inline F cut(F x, float low, float high) { return min(all(high), max(all(low), x)); }

// 1 / (1 + e^-x); no error is larger than 2 units of the last place of 1.
inline F sigmoid(F x) {
    F c = cut(x, -100.0f, 100.0f);
    // exp does not promise to keep a NaN; c - c is 0 for every other number.
    return all(1.0f) / (all(1.0f) + exp(all(0.0f) - c)) + (c - c);
}

// x * sigmoid(scale): the factor x stops where the sigmoid is 0 to every digit, or infinity times 0 would follow.
inline F gated_by_sigmoid(F x, F scale) { return max(all(-1e6f), x) / (all(1.0f) + exp(all(0.0f) - scale)); }

// e^x - 1 of x = n log 2 + r, from 2^n and e^r - 1, for whole n: its relative error stays small around 0.
inline F exp_less_one(F x) {
    F n = round(x * all(1.44269504f));
    F r = fma(n, all(-0.693145752f), x);
    r = fma(n, all(-1.42860677e-6f), r);
    // e^r - 1 by Taylor: |r| < 0.35, and 0.35^8 / 8! is 5.6e-9.
    F p = all(1.0f / 5040);
    p = fma(p, r, all(1.0f / 720));
    p = fma(p, r, all(1.0f / 120));
    p = fma(p, r, all(1.0f / 24));
    p = fma(p, r, all(1.0f / 6));
    p = fma(p, r, all(0.5f));
    p = fma(p, r * r, r);
    F power = scale2(all(1.0f), n);
    return fma(power, p, power - all(1.0f));
}

// tanh by e^2x - 1, whose relative error stays small around 0, where 1 - 2 / (e^2x + 1) has none left of it.
inline F tanh(F x) {
    F less_one = exp_less_one(cut(x, -10.0f, 10.0f) * all(2.0f));
    return less_one / (less_one + all(2.0f));
}

// x times the probability that a normal number is below x, as max(x, 0) - |x| Q(|x|). Q, the probability above, is
// e^(-a^2 / 2) t P(t) with t = 1 / (1 + 0.27 a); P is the polynomial of smallest relative error (2.4e-8) over 0 ... 15.
inline F gelu(F x) {
    F a = min(all(15.0f), abs(x));
    F t = all(1.0f) / fma(a, all(0.27f), all(1.0f));
    F p = all(0.0289955232f);
    p = fma(p, t, all(-0.126658678f));
    p = fma(p, t, all(0.170155987f));
    p = fma(p, t, all(-0.0696503073f));
    p = fma(p, t, all(0.108142152f));
    p = fma(p, t, all(0.0719085783f));
    p = fma(p, t, all(0.101848476f));
    p = fma(p, t, all(0.107537284f));
    p = fma(p, t, all(0.107721001f));
    F above = exp(a * a * all(-0.5f)) * (t * p);
    return max(all(0.0f), x) - a * above;
}

inline F gelu_tanh(F x) {
    // 0.5 (1 + tanh u) is sigmoid(2u). Cut before the cube: beyond 1e4 the sigmoid is 0 or 1.
    F c = cut(x, -1e4f, 1e4f);
    F twice = fma(c * c * c, all(0.044715f), c) * all(1.59576912f);
    return gated_by_sigmoid(x, twice);
}

inline F relu(F x) { return max(all(0.0f), x); }

// PST_XIELU as the sum of what holds above 0, what holds below, and x / 2.
inline F xielu(F x, float positive, float negative) {
    const F close = all(-1e-6f), above = relu(x);
    F below = exp_less_one(max(all(-100.0f), min(close, x))) - min(all(0.0f), x);
    // Above 0 that is e^-1e-6 - 1 throughout, which is taken out again: `is_above` is 1 there and 0 below.
    F is_above = min(all(1.0f), above * all(3e38f));
    below = below - is_above * exp_less_one(close);
    return fma(all(positive) * above, above, all(negative) * below) + all(0.5f) * x;
}

// Those that cut what they get are only gated.
inline bool is_clamped(int activation) { return activation == PST_SWIGLU_CLAMPED || activation == PST_SILU_CLAMPED; }

// `activation` is one of enum pst_activation that is not clamped, but PST_XIELU.
inline F activate(F x, int activation) {
    switch (activation) {
        case PST_SILU: return gated_by_sigmoid(x, x);
        case PST_GELU: return gelu(x);
        case PST_GELU_TANH: return gelu_tanh(x);
        case PST_RELU: return relu(x);
        case PST_RELU2: return relu(x) * relu(x);
        case PST_SIGMOID: return sigmoid(x);
        case PST_TANH: return tanh(x);
        case PST_QUICK_GELU: return gated_by_sigmoid(x, x * all(1.702f));
    }
    return x;
}

// log(1 + e^x): the larger of x and 0, and log(1 + u) of u = e^-|x| by the series of 2 artanh(u / (2 + u)), whose argument
// is a third at most: what is left out is below 2e-9 of the whole.
inline F softplus(F x) {
    F u = exp(all(0.0f) - abs(x)), s = u / (u + all(2.0f)), z = s * s;
    F p = all(1.0f / 15);
    p = fma(p, z, all(1.0f / 13));
    p = fma(p, z, all(1.0f / 11));
    p = fma(p, z, all(1.0f / 9));
    p = fma(p, z, all(1.0f / 7));
    p = fma(p, z, all(1.0f / 5));
    p = fma(p, z, all(1.0f / 3));
    return max(all(0.0f), x) + fma(p * z, s, s) * all(2.0f);
}

// act(gate) * up. Up is cut to `limit`, and so is act(gate) from above, or the gate of clamped ones; 0 or below: none.
inline F activate_gated(F gate, F up, int activation, float limit) {
    if (!is_clamped(activation)) {
        gate = activate(gate, activation);
        if (limit <= 0.0f) return gate * up;
        return min(all(limit), gate) * cut(up, -limit, limit);
    }
    if (limit > 0.0f) {
        gate = min(all(limit), gate);
        up = cut(up, -limit, limit);
    }
    if (activation == PST_SILU_CLAMPED) return activate(gate, PST_SILU) * up;
    return gated_by_sigmoid(gate, gate * all(1.702f)) * (up + all(1.0f));
}

}  // namespace pst
