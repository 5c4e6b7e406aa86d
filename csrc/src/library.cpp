// What the library is, and what belongs to no operation.
#include <cstring>

#include "kernels.h"
#include "pool.h"
#include "simd.h"

namespace pst {

const Product* find_product(int32_t format, int32_t act) {
    if (const Product* found = float_product(format, act)) return found;
    return int_product(format, act);
}

void widen(const void* x, int32_t dtype, int64_t n, float* out) {
    const auto* half = static_cast<const uint16_t*>(x);
    int64_t i = 0;
    switch (dtype) {
        case PST_F16:
            for (; i + LANES <= n; i += LANES) store(out + i, load_f16(half + i));
            for (; i < n; i++) out[i] = f16_to_f32(half[i]);
            return;
        case PST_BF16:
            for (; i + LANES <= n; i += LANES) store(out + i, load_bf16(half + i));
            for (; i < n; i++) out[i] = bf16_to_f32(half[i]);
            return;
        default: std::memcpy(out, x, size_t(n) * sizeof(float));
    }
}

namespace {

struct Reading {
    const uint64_t* data;
    int64_t count;
    std::atomic<uint64_t> sum{0};
};

void read_all(Team& team, void* argument) {
    auto& reading = *static_cast<Reading*>(argument);
    // 64 kB a time: long enough for the prefetchers, short enough to share fairly.
    constexpr int64_t STEP = 8192;
    uint64_t total = 0;
    // Prefetched as far ahead as the products do it: the probe has to be as fast as reading can be.
    const int64_t ahead = STREAM_AHEAD / 8;
    for (int64_t first, last; team.next(STEP, reading.count, first, last);) {
        uint64_t part[8] = {};
        int64_t i = first;
        for (; i + 8 <= last; i += 8) {
            if (ahead) __builtin_prefetch(reading.data + i + ahead);
            for (int j = 0; j < 8; j++) part[j] += reading.data[i + j];
        }
        for (; i < last; i++) part[0] += reading.data[i];
        for (uint64_t p : part) total += p;
    }
    reading.sum.fetch_add(total);
}

}  // namespace

}  // namespace pst

extern "C" {

int32_t pst_abi(void) { return PST_ABI; }

const char* pst_isa_name(void) {
#if defined(__AVX512BF16__)
    return "avx512bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "base";
#endif
}

int64_t pst_panel_bytes(int32_t format, int32_t cols, int32_t group) {
    if (cols <= 0) return -1;
    int64_t k = cols;
    switch (format) {
        case PST_M_F32: return k * 256;
        case PST_M_F16: return k * 128;
        case PST_M_BF16: return (k + 1) / 2 * 256;
        case PST_M_I8: return (k + 3) / 4 * 256;
        case PST_M_I4:
            if (group != 32 && group != 64 && group != 128) return -1;
            return (k + group - 1) / group * group / 8 * 256;
    }
    return -1;
}

int64_t pst_panel_scale_bytes(int32_t format, int32_t cols, int32_t group) {
    if (pst_panel_bytes(format, cols, group) < 0) return -1;
    if (format == PST_M_I8) return 256;
    return format == PST_M_I4 ? int64_t((cols + group - 1) / group) * 128 : 0;
}

int32_t pst_pack(int32_t format, int32_t cols, int32_t group, int32_t dtype, const void* const* row_of, int32_t first,
                 int32_t last, void* data, void* scales) {
    int64_t bytes = pst_panel_bytes(format, cols, group), scale_bytes = pst_panel_scale_bytes(format, cols, group);
    if (bytes < 0 || dtype < PST_F32 || dtype > PST_BF16) return -1;
    for (int64_t p = first; p < last; p++) {
        uint8_t* to = static_cast<uint8_t*>(data) + p * bytes;
        uint8_t* to_scales = scales ? static_cast<uint8_t*>(scales) + p * scale_bytes : nullptr;
        const void* const* from = row_of + p * pst::PANEL;
        bool known = pst::pack_float(format, cols, dtype, from, to) ||
                     pst::pack_int(format, cols, group, dtype, from, to, to_scales);
        if (!known) return -1;
    }
    return 0;
}

int32_t pst_unpack(const pst_matrix* m, int32_t panel, float* out) {
    int64_t bytes = pst_panel_bytes(m->format, m->cols, m->group);
    int64_t scale_bytes = pst_panel_scale_bytes(m->format, m->cols, m->group);
    if (bytes < 0 || panel < 0 || panel >= (m->rows + pst::PANEL - 1) / pst::PANEL) return -1;
    const uint8_t* data = static_cast<const uint8_t*>(m->data) + panel * bytes;
    const uint8_t* scales = m->scales ? static_cast<const uint8_t*>(m->scales) + panel * scale_bytes : nullptr;
    bool known = pst::unpack_float(m->format, m->cols, data, out) ||
                 pst::unpack_int(m->format, m->cols, m->group, data, scales, out);
    return known ? 0 : -1;
}

uint64_t pst_read(pst_pool* pool, const void* data, int64_t bytes) {
    pst::Reading reading{static_cast<const uint64_t*>(data), bytes / 8};
    pool->run(pst::read_all, &reading);
    return reading.sum.load();
}

}  // extern "C"
