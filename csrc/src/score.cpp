// Whether this processor can run the library, and what is asked of it as the library is opened: compiled without any
// instruction set's flags, so that both are safe everywhere. PST_ISA_LEVEL is the build's: on x86-64 0 base, 1 avx2,
// 2 avx512, 3 avx512bf16; on aarch64 0 neon, 1 neon-dotprod, 2 neon-bf16.
#include <unistd.h>

#include "penstock.h"

#ifndef PST_ISA_LEVEL
#define PST_ISA_LEVEL 0
#endif

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif PST_ISA_LEVEL >= 1 && defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pst {

namespace {

// Zen 4 follows a stream of weights by itself: asked ahead it reads 4 to 12 % slower (docs/log.md). A Zen 5
// reads codes 10 to 25 % faster with two pages than with one, and other weights no slower; three gain nothing.
int64_t stream_ahead() {
#if PST_ISA_LEVEL >= 2 && !defined(__aarch64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    const unsigned vendor = __get_cpuid(0, &a, &b, &c, &d) ? b : 0, auth = 0x68747541;  // "Auth"enticAMD
    // Of AMD's families only 0x19, Zen 3 and 4, and 0x1a, Zen 5, are here; Zen 3 has no AVX512.
    if (vendor == auth && __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) == 0x19) return 0;
#endif
    return 8192;
}

#if PST_ISA_LEVEL >= 1 && defined(__x86_64__)
// Not by __builtin_cpu_supports: what it reads is a part of GCC's library, which other compilers come without.
bool has(int level) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    const unsigned osxsave = 1u << 27, fma = 1u << 12, f16c = 1u << 29;
    if ((c & (osxsave | fma | f16c)) != (osxsave | fma | f16c)) return false;
    // Registers that the operating system does not save do not count.
    unsigned saved = 0, high = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    const unsigned ymm = 0x06, zmm = 0xe6, wanted = level >= 2 ? zmm : ymm;
    if ((saved & wanted) != wanted || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned avx2 = 1u << 5, avx512f = 1u << 16, dq = 1u << 17, cd = 1u << 28, bw = 1u << 30, vl = 1u << 31;
    const unsigned bits = level >= 2 ? avx2 | avx512f | dq | cd | bw | vl : avx2;
    if ((b & bits) != bits) return false;
    if (level < 3) return true;
    const bool vnni = c & 1u << 11;
    return vnni && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);  // bfloat16
}
#endif

// Rows and sums lie there, too.
int64_t near_bytes() {
    const long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return (size > 0 ? size : 512 * 1024) / 8 * 7;
}

}  // namespace

extern const int64_t STREAM_AHEAD = stream_ahead();
extern const int64_t NEAR_BYTES = near_bytes();

}  // namespace pst

extern "C" int32_t pst_score(void) {
#if PST_ISA_LEVEL == 0
    return 1;
#elif defined(__x86_64__)
    return pst::has(PST_ISA_LEVEL) ? 1 + PST_ISA_LEVEL : 0;
#elif defined(__aarch64__)
    // By number: the headers of older systems have no names for the later ones.
    constexpr unsigned long DOTPROD = 1ul << 20;
    bool fits = getauxval(AT_HWCAP) & DOTPROD;
#if PST_ISA_LEVEL >= 2
    constexpr unsigned long I8MM = 1ul << 13, BF16 = 1ul << 14;
    fits = fits && (getauxval(AT_HWCAP2) & (I8MM | BF16)) == (I8MM | BF16);
#endif
    return fits ? 1 + PST_ISA_LEVEL : 0;
#else
    return 0;
#endif
}
