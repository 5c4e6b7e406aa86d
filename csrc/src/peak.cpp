// How fast registers multiply: a loop of nothing but a format's multiply-add, on all threads of a pool at once.
#include <atomic>

#include "int_lanes.h"
#include "kernels.h"
#include "pool.h"

namespace pst {

namespace {

// `hide`: the compiler must not know that it is the same number again, and work anything out ahead of the loop.
#if defined(__AVX512F__)
constexpr int SUMS = 24;  // as many as the products keep: enough to hide what an instruction takes
template <class In> inline void hide(In& x) { asm volatile("" : "+v"(x.v)); }
#elif defined(__AVX2__)
constexpr int SUMS = 6;  // a vector is two registers of 16
template <class In> inline void hide(In& x) { asm volatile("" : "+x"(x.lo), "+x"(x.hi)); }
#elif defined(__aarch64__)
constexpr int SUMS = 4;  // a vector is four registers of 32
template <class In> inline void hide(In& x) {
    asm volatile("" : "+w"(x.v[0]), "+w"(x.v[1]), "+w"(x.v[2]), "+w"(x.v[3]));
}
#else
constexpr int SUMS = 4;
template <class In> inline void hide(In& x) { asm volatile("" : "+m"(x)); }
#endif

struct Peak {
    int32_t format, act;
    int64_t turns;
    std::atomic<int32_t> sum{0};
    std::atomic<int64_t> operations{0};
};

// Of all lanes: what nobody reads is not worked out.
inline int32_t total(I x) {
    int32_t lanes[LANES], out = 0;
    std::memcpy(lanes, &x, sizeof lanes);
    for (int32_t lane : lanes) out += lane;
    return out;
}
inline int32_t total(F x) {
    float lanes[LANES], out = 0;
    store(lanes, x);
    for (float lane : lanes) out += lane;
    return int32_t(out);
}

// EACH: operations of one lane in one multiply-add. Zeros: no value is slower than another then.
template <int EACH, class Sum, class In, class Add>
void multiply(Peak& peak, Sum zero, In w, In x, Add add) {
    Sum sum[SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++) sum[i] = zero;
    for (int64_t turn = 0; turn < peak.turns; turn++) {
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) {
            hide(w);
            hide(x);
            add(sum[i], w, x);
        }
    }
    int32_t kept = 0;
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++) kept += total(sum[i]);
    peak.sum += kept;
    peak.operations += peak.turns * SUMS * LANES * EACH;
}

void of_one_thread(Team&, void* argument) {
    auto& peak = *static_cast<Peak*>(argument);
    if (peak.act == PST_A_I8)
        return multiply<8>(peak, every(0), every(0), every(0), [](I& sum, I w, I x) __attribute__((always_inline)) { dot_u7(sum, w, x); });
#if defined(PST_BF16_PAIRS)
    if (peak.act == PST_A_BF16)
        return multiply<4>(peak, all(0.0f), every(0), every(0), [](F& sum, I w, I x) __attribute__((always_inline)) { dot_bf16(sum, w, x); });
#endif
    multiply<2>(peak, all(0.0f), all(0.0f), all(0.0f), [](F& sum, F w, F x) __attribute__((always_inline)) { add_product(sum, w, x); });
}

}  // namespace

}  // namespace pst

extern "C" int64_t pst_multiply(pst_pool* pool, int32_t format, int32_t act, int64_t turns) {
    if (turns < 1 || !pst::find_product(format, act)) return -1;
    pst::Peak peak{format, act, turns, {}, {}};
    pool->run(pst::of_one_thread, &peak);
    return peak.operations.load();
}
