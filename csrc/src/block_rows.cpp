#include "block_rows.h"

#include <cstring>

#include "int_lanes.h"
#include "simd.h"

namespace pst {

namespace {

F load_some(const float* x, int64_t at, int64_t cols) {
    const int64_t rest = cols - at;
    return rest >= LANES ? load(x + at) : rest > 0 ? load(x + at, int(rest)) : all(0.0f);
}

// Sums of the stretches of a row of floats, and of all of it.
void sum_floats(const float* x, int64_t cols, const BlockRow& row, uint8_t* data) {
    auto* totals = reinterpret_cast<float*>(data + row.totals_at);
    const int64_t length = row.stretch ? row.stretch : row.inputs;
    for (int64_t s = 0; s < row.stretches(); s++) {
        F sums = all(0.0f);
        for (int64_t i = s * length; i < (s + 1) * length && i < cols; i += LANES) sums = sums + load_some(x, i, cols);
        totals[s] = sum(sums);
    }
}

}  // namespace

void prepare_blocks_s8(const float* x, int cols, int group, uint8_t* data) {
    const BlockRow row(cols, group, 1);
    auto* scales = reinterpret_cast<float*>(data + row.scales_at);
    auto* sums = reinterpret_cast<int32_t*>(data + row.sums_at);
    auto* totals = reinterpret_cast<float*>(data + row.totals_at);
    float whole = 0.0f;
    int64_t s = 0;
    for (int64_t from = 0; from < row.inputs; from += row.block) {
        F most = all(0.0f), wrong = all(0.0f);
        for (int64_t i = from; i < from + row.block && i < cols; i += LANES) {
            const F v = load_some(x, i, cols);
            most = max(abs(v), most);              // a NaN is passed over here
            wrong = fma(v, all(0.0f), wrong);      // and lasts here
        }
        const float top = sum(wrong) + largest(most), scale = top / 127.0f;
        *scales++ = scale;
        // 127 / top would be infinite for the smallest numbers: those are raised first, which is exact.
        const float lift = top < 0x1p-64f ? 0x1p64f : 1.0f;
        const bool any = top > 0;  // zeros; or something is not finite, and the scale makes all outputs NaN
        const F lifts = all(lift), units = all(any ? 127.0f / (top * lift) : 0.0f);
        for (int64_t at = from; at < from + row.block; at += row.stretch) {
            F total = all(0.0f);
            for (int64_t i = at; i < at + row.stretch; i += LANES) {
                const F v = any ? round(load_some(x, i, cols) * lifts * units) : all(0.0f);
                total = total + v;
                store_s8(data + i, v);
            }
            const float sum_of = sum(total);
            sums[s] = int32_t(sum_of);
            totals[s] = sum_of * scale;
            whole += totals[s++];
        }
    }
    totals[s] = whole;
}

void prepare_blocks_f32(const float* x, int cols, int group, uint8_t* data) {
    const BlockRow row(cols, group, 4);
    std::memcpy(data, x, size_t(cols) * 4);
    std::memset(data + int64_t(cols) * 4, 0, size_t(row.inputs - cols) * 4);
    sum_floats(x, cols, row, data);
}

void prepare_blocks_bf16(const float* x, int cols, int group, uint8_t* data) {
    const BlockRow row(cols, group, 2);
    auto* out = reinterpret_cast<uint16_t*>(data);
    auto* totals = reinterpret_cast<float*>(data + row.totals_at);
    const int64_t length = row.stretch ? row.stretch : row.inputs;
    for (int64_t s = 0; s < row.stretches(); s++) {
        F sums = all(0.0f);
        for (int64_t i = s * length; i < (s + 1) * length; i += LANES) {
            store_bf16(out + i, load_some(x, i, cols));
            sums = sums + load_bf16(out + i);
        }
        totals[s] = sum(sums);
    }
}

void prepare_blocks_rounded(const float* x, int cols, int group, uint8_t* data) {
    const BlockRow row(cols, group, 4);
    auto* out = reinterpret_cast<float*>(data);
    for (int64_t i = 0; i < row.inputs; i += LANES) {
        uint16_t rounded[LANES];
        store_bf16(rounded, load_some(x, i, cols));
        store(out + i, load_bf16(rounded));
    }
    sum_floats(out, cols, row, data);
}

}  // namespace pst
