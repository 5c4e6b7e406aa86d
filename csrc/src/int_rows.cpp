#include "int_rows.h"

#include "int_lanes.h"

namespace pst {

namespace {

int lanes_left(int64_t i, int64_t n) { return n - i < LANES ? int(n - i) : LANES; }

// The largest |x|; NaN if one of them is NaN or infinite.
float largest_size(const float* x, int n) {
    F most = all(0.0f), zero = all(0.0f);
    for (int i = 0; i < n; i += LANES) {
        F v = load(x + i, lanes_left(i, n));
        most = max(abs(v), most);          // a NaN is passed over here
        zero = fma(v, all(0.0f), zero);    // and lasts here
    }
    return sum(zero) + largest(most);
}

// Inputs from ... from+n-1 (n a multiple of 4; zeros from `cols` on) as s8. Returns their sum: exact as a float, below
// 2^24 for 132,000 inputs. Up to 12 zeros are written behind them, within what a row is padded to.
int32_t write_s8(const float* x, int64_t from, int64_t n, int64_t cols, float lift, float units, uint8_t* out) {
    F total = all(0.0f);
    const F lifts = all(lift), unit = all(units);
    int64_t i = from;
    for (; i + LANES <= from + n && i + LANES <= cols; i += LANES) {
        F v = round(load(x + i) * lifts * unit);
        total = total + v;
        store_s8(out + i, v);
    }
    for (; i < from + n; i += LANES) {
        F v = i < cols ? round(load(x + i, lanes_left(i, cols)) * lifts * unit) : all(0.0f);
        total = total + v;
        store_s8(out + i, v);
    }
    return int32_t(sum(total));
}

}  // namespace

void prepare_s8(const float* x, int cols, int group, uint8_t* data, float* scale, int32_t* sums) {
    const int64_t padded = padded_inputs(cols, group), unit = group ? group : padded;
    const float most = largest_size(x, cols);
    *scale = most / 127.0f;
    if (!(most > 0)) {  // zeros; or a row with a NaN or an infinity, all of whose outputs become NaN by the scale
        std::memset(data, 0, size_t(padded));
        for (int64_t g = 0; g * unit < padded; g++) sums[g] = 0;
        return;
    }
    // 127 / most would be infinite for the smallest numbers: those are raised first, which is exact.
    const float lift = most < 0x1p-64f ? 0x1p64f : 1.0f;
    const float units = 127.0f / (most * lift);
    for (int64_t g = 0; g * unit < padded; g++) sums[g] = write_s8(x, g * unit, unit, cols, lift, units, data);
}

void prepare_f32(const float* x, int cols, int group, uint8_t* data, float*, int32_t*) {
    std::memcpy(data, x, size_t(cols) * 4);
    std::memset(data + int64_t(cols) * 4, 0, size_t(padded_inputs(cols, group) - cols) * 4);
}

void prepare_bf16(const float* x, int cols, int group, uint8_t* data, float*, int32_t*) {
    auto* out = reinterpret_cast<uint16_t*>(data);
    int i = 0;
    for (; i + LANES <= cols; i += LANES) store_bf16(out + i, load(x + i));
    for (; i < cols; i++) out[i] = f32_to_bf16(x[i]);
    std::memset(out + cols, 0, size_t(padded_inputs(cols, group) - cols) * 2);
}

void prepare_rounded(const float* x, int cols, int group, uint8_t* data, float*, int32_t*) {
    auto* out = reinterpret_cast<float*>(data);
    for (int i = 0; i < cols; i++) out[i] = bf16_to_f32(f32_to_bf16(x[i]));
    std::memset(out + cols, 0, size_t(padded_inputs(cols, group) - cols) * 4);
}

}  // namespace pst
