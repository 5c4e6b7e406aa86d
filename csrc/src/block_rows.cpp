#include "block_rows.h"

#include <cstring>
#include <limits>

#include "int_lanes.h"
#include "simd.h"

namespace pst {

namespace {

F load_some(const float* x, int64_t at, int64_t cols) {
    const int64_t rest = cols - at;
    return rest >= LANES ? load(x + at) : rest > 0 ? load(x + at, int(rest)) : all(0.0f);
}

// The largest |x| of n numbers (a multiple of the lanes) as bits: beyond those of infinity if one is a NaN.
uint32_t largest_bits(const float* x, int64_t n) {
#if defined(__AVX512F__)
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += LANES)
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7fffffff)));
    return _mm512_reduce_max_epu32(most);
#else
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
#endif
}

// The sum of n s8 values, a multiple of 16.
int32_t sum_s8(const uint8_t* x, int64_t n) {
#if defined(__AVX2__)
    __m128i sums = _mm_setzero_si128();
    for (int64_t i = 0; i < n; i += 16) {
        const __m128i lifted = _mm_xor_si128(_mm_loadu_si128((const __m128i*)(x + i)), _mm_set1_epi8(-128));
        sums = _mm_add_epi64(sums, _mm_sad_epu8(lifted, _mm_setzero_si128()));
    }
    return int32_t(_mm_cvtsi128_si64(sums) + _mm_extract_epi64(sums, 1) - 128 * n);
#else
    int32_t out = 0;
    for (int64_t i = 0; i < n; i++) out += int8_t(x[i]);
    return out;
#endif
}

// `length` numbers (a multiple of the lanes) to s8, in units of `scale`, which becomes what a unit stands for.
void round_block(const float* x, int64_t length, uint8_t* out, float* scale) {
    const uint32_t bits = largest_bits(x, length);
    if (bits >= 0x7f800000 || !bits) {  // something is not finite: the scale makes all outputs NaN; or zeros
        *scale = bits ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        std::memset(out, 0, size_t(length));
        return;
    }
    float top;
    std::memcpy(&top, &bits, 4);
    *scale = top / 127.0f;
    // 127 / top would be infinite for the smallest numbers: those are raised first, which is exact.
    const bool tiny = top < 0x1p-64f;
    const F units = all(127.0f / (tiny ? top * 0x1p64f : top));
    for (int64_t i = 0; i < length; i += LANES)
        store_s8(out + i, round((tiny ? load(x + i) * all(0x1p64f) : load(x + i)) * units));
}

// The sum of n numbers behind which there are 15 zeros at least, in a fixed order.
float sum_of(const float* x, int64_t n) {
    F sums = all(0.0f);
    for (int64_t i = 0; i < n; i += LANES) sums = sums + load(x + i);
    return sum(sums);
}

// Sums of the stretches of a padded row of floats.
void sum_floats(const float* x, const BlockRow& row, uint8_t* data) {
    auto* totals = reinterpret_cast<float*>(data + row.totals_at);
    const int64_t length = row.stretch ? row.stretch : row.inputs;
    for (int64_t s = 0; s < row.stretches(); s++) totals[s] = sum_of(x + s * length, length);
}

}  // namespace

void prepare_blocks_s8(const float* x, int cols, int group, uint8_t* data) {
    const BlockRow row(cols, group, 1);
    auto* scales = reinterpret_cast<float*>(data + row.scales_at);
    auto* sums = reinterpret_cast<int32_t*>(data + row.sums_at);
    auto* totals = reinterpret_cast<float*>(data + row.totals_at);
    const int64_t whole = cols / row.block;
    for (int64_t b = 0; b < whole; b++) round_block(x + b * row.block, row.block, data + b * row.block, scales + b);
    if (whole * row.block < row.inputs) {
        float last[CHUNK] = {};
        std::memcpy(last, x + whole * row.block, size_t(cols - whole * row.block) * 4);
        for (int64_t b = whole; b * row.block < row.inputs; b++)
            round_block(last + (b - whole) * row.block, row.block, data + b * row.block, scales + b);
    }
    const int64_t stretches = row.stretches();
    const int shift = row.stretch < row.block;  // two of them in a block of 32
    for (int64_t s = 0; s < stretches; s++) sums[s] = sum_s8(data + s * row.stretch, row.stretch);
    for (int64_t s = 0; s < stretches; s++) totals[s] = float(sums[s]) * scales[s >> shift];
    std::memset(totals + stretches, 0, LANES * 4);
    totals[stretches] = sum_of(totals, stretches);
}

void prepare_blocks_f32(const float* x, int cols, int group, uint8_t* data) {
    const BlockRow row(cols, group, 4);
    std::memcpy(data, x, size_t(cols) * 4);
    std::memset(data + int64_t(cols) * 4, 0, size_t(row.inputs - cols) * 4);
    sum_floats(reinterpret_cast<const float*>(data), row, data);
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
    sum_floats(out, row, data);
}

}  // namespace pst
