// Weights as 8-bit and 4-bit integers with scales (docs/design/0007).
#include <limits>
#include <vector>

#include "int_rows.h"
#include "kernels.h"
#include "simd.h"

namespace pst {

namespace {

constexpr float MAX_HALF = 65504.0f;
constexpr int MAX_GROUP = 128;

// To the nearest, ties to even, for |v| < 2^22.
inline float nearest(float v) { return (v + 12582912.0f) - 12582912.0f; }

inline float clamp(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

bool all_finite(const float* w, int n) {
    bool finite = true;
    for (int i = 0; i < n; i++) finite &= std::fabs(w[i]) <= std::numeric_limits<float>::max();
    return finite;
}

float largest_size(const float* w, int n) {
    float most = 0;
    for (int i = 0; i < n; i++) most = std::fabs(w[i]) > most ? std::fabs(w[i]) : most;
    return most;
}

// ---- PST_M_I8

void pack_output8(const float* w, int cols, uint8_t* to, float* scale) {
    // What is not finite must not hide behind finite weights: a scale of NaN makes the output NaN.
    const bool finite = all_finite(w, cols);
    *scale = finite ? largest_size(w, cols) / 127.0f : std::numeric_limits<float>::quiet_NaN();
    const bool any = *scale > 0;  // false where the largest weight is so small that its 127th is 0
    for (int k = 0; k < cols; k++) {
        float v = any ? nearest(clamp(w[k] / *scale, -127.0f, 127.0f)) : 0.0f;
        to[int64_t(k / 4) * 4 * PANEL + k % 4] = uint8_t(int(v) + 128);
    }
}

// ---- PST_M_I4

// Values -8 ... 7 in units of `scale`; zeros for a scale of 0.
void round4(const float* w, int n, float scale, float* values) {
    const float units = scale != 0 ? 1.0f / scale : 0.0f;
    for (int i = 0; i < n; i++) values[i] = nearest(clamp(w[i] * units, -8.0f, 7.0f));
}

// Products are not fused here, so that every instruction set chooses the same scales.
float squared_error(const float* w, int n, float scale, const float* values, float unit) {
    F total = all(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const int rest = n - i < LANES ? n - i : LANES;
        F e = (load(w + i, rest) - all(scale) * load(values + i, rest)) * all(unit);
        total = total + e * e;
    }
    return sum(total);
}

// The scale with which `values` come closest to w.
float fitted(const float* w, int n, const float* values, float unit) {
    F wv = all(0.0f), vv = all(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const int rest = n - i < LANES ? n - i : LANES;
        F v = load(values + i, rest);
        wv = wv + load(w + i, rest) * all(unit) * v;
        vv = vv + v * v;
    }
    const float squares = sum(vv);
    return squares > 0 ? sum(wv) / squares / unit : 0.0f;
}

struct Best {
    uint16_t scale = 0;
    float error = std::numeric_limits<float>::infinity();
    float values[MAX_GROUP] = {};
};

void consider(const float* w, int n, float scale, float unit, float* values, Best& best) {
    const uint16_t stored = f32_to_f16(clamp(scale, -MAX_HALF, MAX_HALF));
    const float exact = f16_to_f32(stored);
    round4(w, n, exact, values);
    const float error = squared_error(w, n, exact, values, unit);
    if (error >= best.error) return;
    best.scale = stored;
    best.error = error;
    std::memcpy(best.values, values, size_t(n) * 4);
}

// Of a few scales the one with the least squared error. The weight of the largest size may lie at -8, near it, or at 7:
// the scale has the sign for it. Each is tried as it is, and fitted once to the values it gives.
uint16_t round_group(const float* w, int n, float* values) {
    std::memset(values, 0, size_t(n) * 4);
    if (!all_finite(w, n)) return 0x7e00;  // NaN: see pack_output8
    float most = 0;
    for (int i = 0; i < n; i++) most = std::fabs(w[i]) > std::fabs(most) ? w[i] : most;
    if (std::fabs(most) < 0x1p-40f) return 0;  // every scale would be 0 as a half
    const float unit = std::ldexp(1.0f, -std::ilogb(most));  // squares in it neither overflow nor vanish
    Best best;
    for (float place : {7.0f, -7.0f, -8.0f, -7.5f, -8.5f, -9.0f}) {
        consider(w, n, most / place, unit, values, best);
        consider(w, n, fitted(w, n, values, unit), unit, values, best);
    }
    std::memcpy(values, best.values, size_t(n) * 4);
    return best.scale;
}

void pack_output4(const float* w, int cols, int group, uint8_t* to, uint16_t* scales) {
    float values[MAX_GROUP];
    for (int from = 0; from < cols; from += group) {
        const int n = cols - from < group ? cols - from : group;
        scales[int64_t(from / group) * PANEL] = round_group(w + from, n, values);
        for (int i = 0; i < n; i++) {
            const int k = from + i;
            uint8_t& byte = to[int64_t(k / 8) * 4 * PANEL + k % 4];
            const int nibble = int(values[i]) + 8;
            byte = uint8_t(k & 4 ? (byte & 0x0f) | nibble << 4 : (byte & 0xf0) | nibble);
        }
    }
}

}  // namespace

bool pack_int(int32_t format, int cols, int group, int32_t dtype, const void* const* row_of, uint8_t* data,
              uint8_t* scales) {
    if ((format != PST_M_I8 && format != PST_M_I4) || !scales) return false;
    const bool eight = format == PST_M_I8;
    // Everything that is not written below is the value 0.
    const int64_t padded = padded_inputs(cols, eight ? 0 : group);
    std::memset(data, eight ? 128 : 0x88, size_t(eight ? padded : padded / 2) * PANEL);
    std::memset(scales, 0, eight ? PANEL * 4 : size_t(padded / group) * PANEL * 2);
    std::vector<float> w(static_cast<size_t>(cols));
    for (int j = 0; j < PANEL; j++) {
        if (!row_of[j]) continue;
        widen(row_of[j], dtype, cols, w.data());
        if (eight) pack_output8(w.data(), cols, data + 4 * j, reinterpret_cast<float*>(scales) + j);
        else pack_output4(w.data(), cols, group, data + 4 * j, reinterpret_cast<uint16_t*>(scales) + j);
    }
    return true;
}

bool unpack_int(int32_t format, int cols, int group, const uint8_t* data, const uint8_t* scales, float* out) {
    if ((format != PST_M_I8 && format != PST_M_I4) || !scales) return false;
    for (int j = 0; j < PANEL; j++) {
        for (int k = 0; k < cols; k++) {
            float& to = out[int64_t(j) * cols + k];
            if (format == PST_M_I8) {
                const int byte = data[(int64_t(k / 4) * PANEL + j) * 4 + k % 4];
                to = float(byte - 128) * reinterpret_cast<const float*>(scales)[j];
                continue;
            }
            const int byte = data[(int64_t(k / 8) * PANEL + j) * 4 + k % 4];
            const float scale = f16_to_f32(reinterpret_cast<const uint16_t*>(scales)[int64_t(k / group) * PANEL + j]);
            to = float((k & 4 ? byte >> 4 : byte & 15) - 8) * scale;
        }
    }
    return true;
}

}  // namespace pst
