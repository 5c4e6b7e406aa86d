// Integer products for AVX2 without VNNI: ways around what its instructions lack. Results are exact sums, so these have
// the bits of the general loop in gemm_int.cpp. Included there.
//
// Multiplications are what is scarce: vpmaddubsw, vpmaddwd, vpsignb and vpabsb share two ports on Zen 3.
#pragma once

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace pst {
namespace {

// By hand, as in int_lanes.h: sums stay in their registers.
inline void add16(__m256i& sum, __m256i x) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x)); }
inline void add32(__m256i& sum, __m256i x) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }

// ---- 4-bit weights: two products are at most 2 x 15 x 127, so eight of them fit 16 bits before they are widened

constexpr int LINES_IN_16_BITS = 4;  // two additions each; groups have 4, 8 or 16 lines

template <int PART, int R, int C>
inline __attribute__((always_inline)) void add_nibbles(I (&sum)[R][C], const I (&line)[C], const uint8_t* const (&x)[R],
                                                       int64_t at) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const I w = low_nibbles<4 * PART>(line[c]);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256i in = X8::inputs(x[r] + at + 4 * PART).lo;
            add16(sum[r][c].lo, _mm256_maddubs_epi16(w.lo, in));
            add16(sum[r][c].hi, _mm256_maddubs_epi16(w.hi, in));
        }
    }
}

template <int R, int C>
void multiply_nibbles(const Rows& rows, int first, const Panel& panel, int output, float* tile) {
    const uint8_t* x[R];
    for (int r = 0; r < R; r++) x[r] = rows.data + (first + r) * rows.stride;
    const uint8_t* line = panel.data + output * 4;
    const int64_t groups = W4::groups(panel), lines = W4::lines(panel);
    int64_t at = 0;
    for (int64_t g = 0; g < groups; g++) {
        I total[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) total[r][c] = X8::begin(rows, first + r, g, W4::OFFSET);
        for (int64_t l = 0; l < lines; l += LINES_IN_16_BITS) {
            I sum[R][C];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sum[r][c] = every(0);
            for (int i = 0; i < LINES_IN_16_BITS; i++) {
                I held[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) {
                    if (R <= 2) __builtin_prefetch(line + STREAM_AHEAD + c * LINE);
                    held[c] = load_line(line + c * LINE);
                }
                add_nibbles<0, R, C>(sum, held, x, at);
                add_nibbles<1, R, C>(sum, held, x, at);
                line += PANEL_LINE;
                at += W4::INPUTS;
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) {
                    add_pairs(total[r][c].lo, sum[r][c].lo);
                    add_pairs(total[r][c].hi, sum[r][c].hi);
                }
        }
        add_group<W4, X8, R, C>(total, panel, g, output, tile);
    }
    scale_rows<R, C>(rows, first, output, tile);
}

// ---- 8-bit weights, many rows: widened to 16 bits there is no sign to move from input to weight

constexpr int WIDE_ROWS = 6;     // 12 of 16 registers for the sums of 6 x 16 outputs
constexpr int STRETCH = 512;     // inputs of the rows that are widened at a time

int64_t pairs_bytes(int cols, int) { return (int64_t(cols) + 3) / 4 * 4 * PANEL; }

// [K/4][64][4] of w + 128 -> [K/2][64][2] of w.
void unpack_pairs(const Panel& panel, uint8_t* scratch) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2,
                                           3, 6, 7, 10, 11, 14, 15);
    const int64_t lines = W8::lines(panel);
    for (int64_t l = 0; l < lines; l++)
        for (int j = 0; j < PANEL; j += 8) {
            __m256i w = _mm256_loadu_si256((const __m256i*)(panel.data + l * PANEL_LINE + j * 4));
            w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
            w = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(w, order), 0xd8);
            uint8_t* to = scratch + l * PANEL_LINE + j * 2;
            _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(w));
            _mm_storeu_si128((__m128i*)(to + 2 * PANEL), _mm256_extracti128_si256(w, 1));
        }
}

// `pairs` pairs of inputs of R rows and 16 outputs, onto sums [R][64].
template <int R>
void multiply_pairs(const int16_t (*x)[STRETCH], const uint8_t* weights, int pairs, I* sums) {
    I sum[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) sum[r] = sums[r * (PANEL / LANES)];
    for (int k = 0; k < pairs; k++, weights += 2 * PANEL) {
        const __m256i lo = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)weights));
        const __m256i hi = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(weights + 16)));
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            int32_t two;
            std::memcpy(&two, &x[r][2 * k], 4);
            const __m256i in = _mm256_set1_epi32(two);
            add32(sum[r].lo, _mm256_madd_epi16(lo, in));
            add32(sum[r].hi, _mm256_madd_epi16(hi, in));
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) sums[r * (PANEL / LANES)] = sum[r];
}

// Rows of s8 meet a panel of `unpack_pairs`.
void many_pairs(const Rows& rows, int first, int count, const Panel& panel, float* tile) {
    using Multiply = void (*)(const int16_t (*)[STRETCH], const uint8_t*, int, I*);
    static constexpr Multiply BY_ROWS[] = {nullptr,           multiply_pairs<1>, multiply_pairs<2>, multiply_pairs<3>,
                                           multiply_pairs<4>, multiply_pairs<5>, multiply_pairs<6>};
    constexpr int VECTORS = PANEL / LANES;
    alignas(32) int16_t wide[WIDE_ROWS][STRETCH];
    I sums[WIDE_ROWS][VECTORS];
    for (int r = 0; r < count; r++)
        for (I& sum : sums[r]) sum = every(0);
    const int64_t inputs = W8::lines(panel) * 4;  // rows are padded with zeros
    for (int64_t from = 0; from < inputs; from += STRETCH) {
        const int n = int(inputs - from < STRETCH ? inputs - from : STRETCH);
        for (int r = 0; r < count; r++) {
            const auto* x = reinterpret_cast<const int8_t*>(rows.data) + (first + r) * rows.stride + from;
            for (int i = 0; i < n; i++) wide[r][i] = x[i];
        }
        for (int c = 0; c < VECTORS; c++)
            BY_ROWS[count](wide, panel.data + from * PANEL + c * 2 * LANES, n / 2, &sums[0][c]);
    }
    for (int r = 0; r < count; r++) {
        const F scale = all(rows.scale[first + r]);
        for (int c = 0; c < VECTORS; c++) {
            const F value = fma(to_float(sums[r][c]), W8::scale(panel, 0, c * LANES), all(0.0f));
            store(tile + r * PANEL + c * LANES, value * scale);
        }
    }
}

}  // namespace
}  // namespace pst

#endif
