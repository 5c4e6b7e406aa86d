// Keys, values and queries made ready for the inner kernels.
#include "attention.h"
#include "rotary.h"
#include "stored.h"

namespace pst {

namespace {

// Sixteen rows of 32 bits each become columns: out[i][j] = rows[j][i].
#if defined(__AVX512F__)
inline void transpose(__m512 r[16], float* out) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    auto pd = [](__m512 x) { return _mm512_castps_pd(x); };
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(t[i + j]), pd(t[i + j + 2])));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(t[i + j]), pd(t[i + j + 2])));
        }
    // r[4 a + c] has, in quarter q, column 4 q + c of rows 4 a ... 4 a + 3.
    for (int c = 0; c < 4; c++) {
        __m512 low = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x44), high = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xee);
        __m512 low2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x44);
        __m512 high2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xee);
        _mm512_store_ps(out + 16 * c, _mm512_shuffle_f32x4(low, low2, 0x88));
        _mm512_store_ps(out + 16 * (4 + c), _mm512_shuffle_f32x4(low, low2, 0xdd));
        _mm512_store_ps(out + 16 * (8 + c), _mm512_shuffle_f32x4(high, high2, 0x88));
        _mm512_store_ps(out + 16 * (12 + c), _mm512_shuffle_f32x4(high, high2, 0xdd));
    }
}
#elif defined(__AVX2__)
inline void transpose8(const __m256* r, float* out) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    auto pd = [](__m256 x) { return _mm256_castps_pd(x); };
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(pd(t[i + j]), pd(t[i + j + 2])));
            u[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pd(t[i + j]), pd(t[i + j + 2])));
        }
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(out + 16 * c, _mm256_permute2f128_ps(u[c], u[c + 4], 0x20));
        _mm256_storeu_ps(out + 16 * (c + 4), _mm256_permute2f128_ps(u[c], u[c + 4], 0x31));
    }
}
#elif defined(__aarch64__)
inline void transpose4(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float* out) {
    auto pd = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
    auto ps = [](float64x2_t x) { return vreinterpretq_f32_f64(x); };
    const float32x4_t ab = vtrn1q_f32(a, b), ab2 = vtrn2q_f32(a, b), cd = vtrn1q_f32(c, d), cd2 = vtrn2q_f32(c, d);
    vst1q_f32(out, ps(vtrn1q_f64(pd(ab), pd(cd))));
    vst1q_f32(out + 16, ps(vtrn1q_f64(pd(ab2), pd(cd2))));
    vst1q_f32(out + 32, ps(vtrn2q_f64(pd(ab), pd(cd))));
    vst1q_f32(out + 48, ps(vtrn2q_f64(pd(ab2), pd(cd2))));
}
#endif

void transpose(const F* r, float* out) {
#if defined(__AVX512F__)
    __m512 x[16];
    for (int i = 0; i < 16; i++) x[i] = r[i].v;
    transpose(x, out);
#elif defined(__AVX2__)
    __m256 x[8];
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 8; i++) x[i] = r[8 * half + i].lo;
        transpose8(x, out + 8 * half);
        for (int i = 0; i < 8; i++) x[i] = r[8 * half + i].hi;
        transpose8(x, out + 8 * 16 + 8 * half);
    }
#elif defined(__aarch64__)
    for (int i = 0; i < 16; i += 4)
        for (int part = 0; part < 4; part++)
            transpose4(r[i].v[part], r[i + 1].v[part], r[i + 2].v[part], r[i + 3].v[part], out + 64 * part + i);
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) out[16 * i + j] = r[j].v[i];
#endif
}

void gather_tile(const Side& side, const uint8_t* const* rows, float* out) {
    for (int at = 0; at < side.padded; at += LANES, out += LANES * TILE) {
        F r[TILE];
        for (int j = 0; j < TILE; j++) r[j] = rows[j] ? load_row(rows[j], side.plane.dtype, at, side.dim) : all(0.0f);
        transpose(r, out);
    }
}

#if defined(__AVX512BF16__)
// 32 numbers of 8 bits as bfloat16, which is exact.
inline __m512i widen(__m256i bytes) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// The first numbers of a row, those of the mask, as bfloat16; zeros for the others.
template <bool BYTES>
inline __m512i load_pairs(const uint8_t* row, __mmask32 mask) {
    if constexpr (BYTES) return widen(_mm256_maskz_loadu_epi8(mask, row));
    return _mm512_maskz_loadu_epi16(mask, row);
}

template <bool BYTES>
void gather_tile_pairs(const Side& side, const uint8_t* const* rows, float* out) {
    for (int at = 0; at < side.padded; at += 2 * LANES, out += LANES * TILE) {
        int rest = side.dim - at;
        __mmask32 mask = rest >= 32 ? ~__mmask32(0) : (__mmask32(1) << rest) - 1;
        __m512 r[TILE];
        for (int j = 0; j < TILE; j++) {
            const uint8_t* row = rows[j] + (BYTES ? 1 : 2) * at;
            r[j] = _mm512_castsi512_ps(rows[j] ? load_pairs<BYTES>(row, mask) : _mm512_setzero_si512());
        }
        transpose(r, out);
    }
}

// Two values become pairs: number by number, the earlier key first.
template <bool BYTES>
void zip(const uint8_t* a, const uint8_t* b, int dim, int padded, uint16_t* out) {
    if constexpr (!BYTES) {
        // Word j of the first 16 pairs is number j / 2 of row j % 2; of the other 16 number 16 + j / 2.
        alignas(64) static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        const __m512i low = _mm512_load_si512(order);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int at = 0; at < padded; at += 2 * LANES) {
            __mmask32 mask = dim - at >= 32 ? ~__mmask32(0) : (__mmask32(1) << (dim - at)) - 1;
            __m512i x = a ? _mm512_maskz_loadu_epi16(mask, a + 2 * at) : _mm512_setzero_si512();
            __m512i y = b ? _mm512_maskz_loadu_epi16(mask, b + 2 * at) : _mm512_setzero_si512();
            _mm512_store_si512(out + 2 * at, _mm512_permutex2var_epi16(x, low, y));
            if (at + LANES < padded) _mm512_store_si512(out + 2 * at + 32, _mm512_permutex2var_epi16(x, high, y));
        }
        return;
    }
    auto bytes = [](const uint8_t* row, int at, __mmask16 mask) {
        return row ? _mm_maskz_loadu_epi8(mask, row + at) : _mm_setzero_si128();
    };
    for (int at = 0; at < padded; at += LANES) {
        __mmask16 mask = dim - at >= LANES ? __mmask16(-1) : first_lanes(dim - at);
        __m128i x = bytes(a, at, mask), y = bytes(b, at, mask);
        _mm512_store_si512(out + 2 * at, widen(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y))));
    }
}
#endif

}  // namespace

void turn_keys(const Rule& rule, const Places& places, int start, float* out, const uint8_t** rows) {
    const Side& stored = rule.stored;
    const pst_rotation& how = rule.rotation;
    for (int j = places.first / TILE * TILE; j < round_up(places.last, TILE); j++) {
        rows[j] = nullptr;
        if (j < places.first || j >= places.last) continue;
        float* row = out + int64_t(j) * rule.keys.padded;
        F scale = all(stored.scaled ? *places.key_scales[j] : 1.0f);
        for (int at = 0; at < rule.keys.padded; at += LANES)
            store(row + at, load_row(places.keys[j], stored.plane.dtype, at, stored.dim) * scale);
        const float* cosines = how.table + int64_t(start + j) * how.half;
        turn_head(row + how.first, cosines, cosines + int64_t(how.positions) * how.half, how.half, how.interleaved);
        rows[j] = reinterpret_cast<const uint8_t*>(row);
    }
}

void gather_keys(const Side& side, const uint8_t* const* keys, int first, int last, Ahead& ahead, uint8_t* out) {
    int64_t tile_floats = int64_t(TILE) * side.padded / (side.pairs ? 2 : 1);
    for (int tile = first / TILE; tile * TILE < last; tile++) {
        ahead.pull(TILE / 2);
        const uint8_t* const* rows = keys + tile * TILE;
        float* to = reinterpret_cast<float*>(out) + tile * tile_floats;
#if defined(__AVX512BF16__)
        if (side.pairs) {
            if (side.scaled) gather_tile_pairs<true>(side, rows, to);
            else gather_tile_pairs<false>(side, rows, to);
            continue;
        }
#endif
        gather_tile(side, rows, to);
    }
}

void gather_values(const Side& side, const uint8_t* const* rows, int first, int last, Ahead& ahead, uint8_t* out) {
#if defined(__AVX512BF16__)
    if (side.pairs) {
        auto* to = reinterpret_cast<uint16_t*>(out);
        for (int j = first / 2 * 2; j < last; j += 2) {
            ahead.pull(1);
            (side.scaled ? zip<true> : zip<false>)(rows[j], rows[j + 1], side.dim, side.padded,
                                                   to + int64_t(j) * side.padded);
        }
        return;
    }
#endif
    auto* to = reinterpret_cast<float*>(out);
    for (int j = first; j < last; j++) {
        ahead.pull(j % 2);
        for (int at = 0; at < side.padded; at += LANES)
            store(to + int64_t(j) * side.padded + at, load_row(rows[j], side.plane.dtype, at, side.dim));
    }
}

void gather_scales(const Side& side, const Places& places, const float* const* scales, float by, float* out) {
    int from = places.first / TILE * TILE, to = int(round_up(places.last, TILE));
    for (int j = from; j < to; j += TILE) store(out + j, all(side.scaled ? 0.0f : by));
    if (!side.scaled) return;
    for (int j = places.first; j < places.last; j++) out[j] = *scales[j] * by;
}

void gather_query(const Side& side, const float* query, uint8_t* out) {
    int32_t dtype = side.pairs ? PST_BF16 : PST_F32;
    int64_t filled = int64_t(side.dim) * item_bytes(dtype), all_bytes = int64_t(side.padded) * item_bytes(dtype);
    narrow(query, side.dim, dtype, out);
    std::memset(out + filled, 0, size_t(all_bytes - filled));
}

}  // namespace pst
