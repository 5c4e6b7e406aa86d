// How a thread rounds while it computes.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

namespace pst {

// How a thread rounds, and what it does with the smallest numbers, must not depend on who called: some libraries switch
// subnormal numbers off for whole threads. Set for a run, and put back.
class PlainRounding {
  public:
#if defined(__x86_64__)
    PlainRounding() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~PlainRounding() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#elif defined(__aarch64__)
    PlainRounding() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        set(0);
    }
    ~PlainRounding() { set(before_); }

  private:
    static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
    uint64_t before_;
#else
    PlainRounding() {}
#endif
};

}  // namespace pst
