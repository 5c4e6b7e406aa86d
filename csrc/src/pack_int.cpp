// Weights as 8-bit and 4-bit integers with scales (docs/design/0007), as codes of PST_M_BLOCK.
#include <limits>
#include <vector>

#include "block.h"
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

// ---- 8 bits

void round_output8(const float* w, int cols, uint8_t* codes, float* scale) {
    // What is not finite must not hide behind finite weights: a scale of NaN makes the output NaN.
    const bool finite = all_finite(w, cols);
    *scale = finite ? largest_size(w, cols) / 127.0f : std::numeric_limits<float>::quiet_NaN();
    const bool any = *scale > 0;  // false where the largest weight is so small that its 127th is 0
    for (int k = 0; k < cols; k++)
        codes[k] = uint8_t(int(any ? nearest(clamp(w[k] / *scale, -127.0f, 127.0f)) : 0.0f) + 128);
}

// The same with a half per group.
uint16_t round_group8(const float* w, int n, uint8_t* codes) {
    const bool finite = all_finite(w, n);
    const uint16_t stored = finite ? f32_to_f16(clamp(largest_size(w, n) / 127.0f, 0.0f, MAX_HALF)) : 0x7e00;
    const float scale = f16_to_f32(stored);
    for (int i = 0; i < n; i++)
        codes[i] = uint8_t(int(scale > 0 ? nearest(clamp(w[i] / scale, -127.0f, 127.0f)) : 0.0f) + 128);
    return stored;
}

void round_output8(const float* w, int cols, int group, uint8_t* codes, uint16_t* scales) {
    for (int from = 0; from < cols; from += group)
        scales[from / group] = round_group8(w + from, cols - from < group ? cols - from : group, codes + from);
}

// ---- 4 bits, a half per group

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
    if (!all_finite(w, n)) return 0x7e00;  // NaN: see round_output8
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

void round_output4(const float* w, int cols, int group, uint8_t* codes, uint16_t* scales) {
    float values[MAX_GROUP];
    for (int from = 0; from < cols; from += group) {
        const int n = cols - from < group ? cols - from : group;
        scales[from / group] = round_group(w + from, n, values);
        for (int i = 0; i < n; i++) codes[from + i] = uint8_t(int(values[i]) + 8);
    }
}

}  // namespace

bool pack_rounded(const BlockShape& s, int32_t dtype, const void* const* row_of, uint8_t* data) {
    const bool whole = s.code == PST_C_U8 && s.scale == PST_S_F32 && !s.group && s.offset == 128;
    const bool grouped = s.scale == PST_S_F16 && s.group >= 32 && s.group <= MAX_GROUP;
    const bool eight = grouped && s.code == PST_C_U8 && s.offset == 128, four = grouped && s.code == PST_C_U4 && s.offset == 8;
    if ((!whole && !eight && !four) || s.zero != PST_Z_NONE) return false;
    const size_t cols = size_t(s.cols), groups = whole ? 1 : (cols - 1) / size_t(s.group) + 1;
    std::vector<float> w(cols);
    std::vector<uint8_t> codes(cols * PANEL);
    std::vector<uint16_t> halves(groups * PANEL);
    float scales[PANEL] = {};
    const void *codes_of[PANEL], *scales_of[PANEL];
    for (size_t j = 0; j < PANEL; j++) {
        codes_of[j] = row_of[j] ? codes.data() + j * cols : nullptr;
        scales_of[j] = !row_of[j] ? nullptr : whole ? static_cast<const void*>(scales + j) : halves.data() + j * groups;
        if (!row_of[j]) continue;
        widen(row_of[j], dtype, s.cols, w.data());
        uint8_t* to = codes.data() + j * cols;
        uint16_t* by = halves.data() + j * groups;
        if (whole) round_output8(w.data(), s.cols, to, scales + j);
        else if (eight) round_output8(w.data(), s.cols, s.group, to, by);
        else round_output4(w.data(), s.cols, s.group, to, by);
    }
    return pack_block(s, {codes_of, scales_of, nullptr, nullptr, nullptr}, data);
}

}  // namespace pst
