// What the library is, and what belongs to no operation.
#include <cstring>

#include "kernels.h"
#include "pool.h"
#include "simd.h"

namespace pst {

const Product* find_product(int32_t format, int32_t act, int32_t code) {
    if (const Product* found = float_product(format, act)) return found;
    return block_product(format, act, code);
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
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "neon-bf16";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "neon-dotprod";
#elif defined(__aarch64__)
    return "neon";
#else
    return "base";
#endif
}

uint64_t pst_read(pst_pool* pool, const void* data, int64_t bytes) {
    pst::Reading reading{static_cast<const uint64_t*>(data), bytes / 8};
    pool->run(pst::read_all, &reading);
    return reading.sum.load();
}

}  // extern "C"
