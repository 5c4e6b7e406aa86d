// Products of rows of float32 or bfloat16 with panels of floating-point weights.
#pragma once

#include "kernels.h"
#include "simd.h"

#if defined(__clang__)
#define PST_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PST_UNROLL _Pragma("GCC unroll 8")
#endif

namespace pst {

inline int64_t float_row_bytes(int cols, int) { return (int64_t(cols) * 4 + 63) / 64 * 64; }

// Weights as the tile meets them. A step takes STEP inputs of all 64 outputs, in PARTS one after the other: `weights`
// is one vector of 16 outputs, `input` the input that they share, in all lanes, `multiply` acc + input * weights.
struct Float32Weights {
    static constexpr int STEP = 1, PARTS = 1, VECTOR_BYTES = 64;
    static F weights(const uint8_t* p, int) { return load(reinterpret_cast<const float*>(p)); }
    static F input(const uint8_t* row, int64_t step, int) { return all(reinterpret_cast<const float*>(row)[step]); }
    static F multiply(F acc, F input, F weights) { return fma(input, weights, acc); }
};

struct Float16Weights : Float32Weights {
    static constexpr int VECTOR_BYTES = 32;
    static F weights(const uint8_t* p, int) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
};

// Pairs of bfloat16 widened in place: the even input of a pair first, then the odd one. Rows are float32.
struct WidenedWeights : Float32Weights {
    static constexpr int STEP = 2, PARTS = 2;
    static F weights(const uint8_t* p, int part) {
#if defined(__AVX512F__)
        __m512i pairs = _mm512_loadu_si512(p);
        return {_mm512_castsi512_ps(part ? _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))
                                         : _mm512_slli_epi32(pairs, 16))};
#elif defined(__AVX2__)
        __m256i lo = _mm256_loadu_si256((const __m256i*)p), hi = _mm256_loadu_si256((const __m256i*)(p + 32));
        __m256i odd = _mm256_set1_epi32(int(0xffff0000));
        lo = part ? _mm256_and_si256(lo, odd) : _mm256_slli_epi32(lo, 16);
        hi = part ? _mm256_and_si256(hi, odd) : _mm256_slli_epi32(hi, 16);
        return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
#elif defined(__aarch64__)
        const uint32x4_t odd = vdupq_n_u32(0xffff0000u);
        const F pairs = load(reinterpret_cast<const float*>(p));
        auto widened = [&](uint32x4_t x) __attribute__((always_inline)) {
            return vreinterpretq_f32_u32(part ? vandq_u32(x, odd) : vshlq_n_u32(x, 16));
        };
        PST_FOUR(F, widened(vreinterpretq_u32_f32(pairs.v[i])));
#else
        uint32_t pairs[LANES];
        std::memcpy(pairs, p, sizeof pairs);
        for (uint32_t& x : pairs) x = part ? x & 0xffff0000u : x << 16;
        F out;
        std::memcpy(out.v, pairs, sizeof pairs);
        return out;
#endif
    }
    static F input(const uint8_t* row, int64_t step, int part) {
        return all(reinterpret_cast<const float*>(row)[2 * step + part]);
    }
};

#if defined(PST_BF16_PAIRS)
// Rows are bfloat16 too: vdpbf16ps adds the odd inputs' products, rounds, adds the even ones', rounds. Products are
// exact; subnormal operands and results count as zero.
struct PairedWeights {
    static constexpr int STEP = 2, PARTS = 1, VECTOR_BYTES = 64;
    static F weights(const uint8_t* p, int) { return load(reinterpret_cast<const float*>(p)); }
    static F input(const uint8_t* row, int64_t step, int) { return all(reinterpret_cast<const float*>(row)[step]); }
    static F multiply(F acc, F input, F weights) {
#if defined(__aarch64__)
        return dot_pairs(acc, input, weights);
#else
        return {_mm512_dpbf16_ps(acc.v, (__m512bh)input.v, (__m512bh)weights.v)};
#endif
    }
};
#endif

// Vectors of outputs that R rows meet at a time: as many accumulators as there are registers for.
template <int R>
constexpr int tile_vectors() {
#if defined(__AVX512F__)
    return 4;
#elif defined(PST_VECTORS)
    return R == 1 ? 4 : R == 2 ? 2 : 1;
#else
    return 1;
#endif
}

// Steps begin ... end-1 of R rows and C vectors of outputs. `sums` [R][64] are where these begin (unless the first step
// is 0) and what comes out: kept in memory between two stretches of steps, a chain of additions is the same chain.
template <class W, int R, int C>
inline void stretch(const uint8_t* const* rows, const uint8_t* panel, int64_t begin, int64_t end, int64_t ahead,
                    Coming::Part coming, float* sums) {
    constexpr int STEP_BYTES = 4 * W::VECTOR_BYTES;
    F acc[R][C];
    // Unrolled by name: the compiler finds registers for the sums only if no loop indexes them.
    PST_UNROLL
    for (int r = 0; r < R; r++)
        PST_UNROLL
        for (int c = 0; c < C; c++) acc[r][c] = begin ? load(sums + r * PANEL + c * LANES) : all(0.0f);
    const uint8_t* p = panel + begin * STEP_BYTES;
    for (int64_t s = begin; s < end; s++, p += STEP_BYTES) {
        if (ahead)
            for (int c = 0; c < C * W::VECTOR_BYTES; c += 64) __builtin_prefetch(p + ahead + c);
        coming.step();
        PST_UNROLL
        for (int part = 0; part < W::PARTS; part++) {
            F w[C];
            PST_UNROLL
            for (int c = 0; c < C; c++) w[c] = W::weights(p + c * W::VECTOR_BYTES, part);
            PST_UNROLL
            for (int r = 0; r < R; r++) {
                F x = W::input(rows[r], s, part);
                PST_UNROLL
                for (int c = 0; c < C; c++) acc[r][c] = W::multiply(acc[r][c], x, w[c]);
            }
        }
    }
    PST_UNROLL
    for (int r = 0; r < R; r++)
        PST_UNROLL
        for (int c = 0; c < C; c++) store(sums + r * PANEL + c * LANES, acc[r][c]);
}

// All 64 outputs of R rows.
template <class W, int R>
void stretch_rows(const uint8_t* data, int64_t stride, const uint8_t* panel, int64_t begin, int64_t end, int64_t ahead,
                  Coming* coming, float* sums) {
    constexpr int C = tile_vectors<R>();
    Coming::Part part;
    if (C * LANES == PANEL && coming) part = coming->take(R, end - begin);
    const uint8_t* rows[R];
    for (int r = 0; r < R; r++) rows[r] = data + r * stride;
    for (int c = 0; c < PANEL / LANES; c += C)
        stretch<W, R, C>(rows, panel + c * W::VECTOR_BYTES, begin, end, ahead, part, sums + c * LANES);
}

constexpr int REGISTER_ROWS = 6;               // rows whose sums fit the registers
constexpr int GROUP_ROWS = 2 * REGISTER_ROWS;  // two such groups may share what the first one brings into L1
constexpr int TILE_ROWS = 8 * GROUP_ROWS;      // of float32: share what the first ones bring into L2
constexpr int64_t L1_STRETCH = 24 * 1024;      // of a panel: most of an L1
constexpr int64_t L2_STRETCH = 240 * 1024;     // half of a small L2; a multiple of L1_STRETCH
constexpr int64_t LARGE_PANEL = 768 * 1024;    // does not stay in a small L2 between two groups

// Steps begin ... end-1 of up to GROUP_ROWS rows. `near`: the panel is in L2 already, from the rows before these.
template <class W>
void group_rows(const uint8_t* data, int64_t stride, int count, const uint8_t* panel, int64_t begin, int64_t end,
                bool near, Coming* coming, float* tile) {
    using Stretch = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, int64_t, int64_t, Coming*, float*);
    static constexpr Stretch BY_ROWS[] = {
        nullptr,
        stretch_rows<W, 1>, stretch_rows<W, 2>, stretch_rows<W, 3>,
        stretch_rows<W, 4>, stretch_rows<W, 5>, stretch_rows<W, 6>,
    };
    constexpr int64_t STEP_BYTES = 4 * W::VECTOR_BYTES;
    const int upper = count <= REGISTER_ROWS ? count : (count + 1) / 2, lower = count - upper;
    // Where the panel comes from further away, both groups meet it stretch by stretch. Otherwise each in one go: sums
    // that stay in registers are worth more than weights in L1.
    const bool together = lower && !near;
    const bool narrow = count > 1 && tile_vectors<REGISTER_ROWS>() < PANEL / LANES;  // several passes over the panel
    const int64_t length = together || narrow ? L1_STRETCH / STEP_BYTES : end - begin;
    for (; begin < end; begin += length) {
        const int64_t stop = begin + length < end ? begin + length : end;
        BY_ROWS[upper](data, stride, panel, begin, stop, STREAM_AHEAD, coming, tile);
        // The lower rows find the stretch in L1, and fetch the next one.
        if (lower)
            BY_ROWS[lower](data + upper * stride, stride, panel, begin, stop, together ? L1_STRETCH : STREAM_AHEAD,
                           coming, tile + upper * PANEL);
    }
}

template <class W>
void float_kernel(const Rows& rows, int first, int count, const Panel& panel, float* tile) {
    constexpr int64_t STEP_BYTES = 4 * W::VECTOR_BYTES;
    const int64_t steps = (panel.cols + W::STEP - 1) / W::STEP;
    const uint8_t* data = rows.data + first * rows.stride;
    // Enough rows meet a part of the panel that stays in L2 before the next part is fetched. With fewer, starting anew
    // on every row costs more than that saves.
    const int64_t bytes = steps * STEP_BYTES;
    const bool large = bytes > LARGE_PANEL, parts = large && count >= 4 * GROUP_ROWS;
    // Kernels that take several passes over a panel for the same rows fetch nothing.
    const bool whole = tile_vectors<REGISTER_ROWS>() == PANEL / LANES;
    const bool near = (rows.count > GROUP_ROWS && (parts || !large)) || (whole && panel.coming);
    const int64_t length = parts ? L2_STRETCH / STEP_BYTES : steps;
    for (int64_t begin = 0; begin < steps; begin += length) {
        const int64_t end = begin + length < steps ? begin + length : steps;
        for (int row = 0; row < count; row += GROUP_ROWS)
            group_rows<W>(data + row * rows.stride, rows.stride, count - row < GROUP_ROWS ? count - row : GROUP_ROWS,
                          panel.data, begin, end, near, panel.coming, tile + row * PANEL);
    }
}

}  // namespace pst

#undef PST_UNROLL
