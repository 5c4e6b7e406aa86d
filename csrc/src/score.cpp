// Whether this processor can run the library: compiled without any instruction set's flags, so that asking is safe
// everywhere. PST_ISA_LEVEL is the build's: 0 base, 1 avx2, 2 avx512, 3 avx512bf16.
#include "penstock.h"

#ifndef PST_ISA_LEVEL
#define PST_ISA_LEVEL 0
#endif

extern "C" int32_t pst_score(void) {
#if PST_ISA_LEVEL == 0
    return 1;
#elif defined(__x86_64__)
    // __builtin_cpu_supports asks the operating system too (xgetbv): registers that it does not save do not count.
    bool fits = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if PST_ISA_LEVEL >= 2
    fits = fits && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd");
#endif
#if PST_ISA_LEVEL >= 3
    fits = fits && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
    return fits ? 1 + PST_ISA_LEVEL : 0;
#else
    return 0;
#endif
}
