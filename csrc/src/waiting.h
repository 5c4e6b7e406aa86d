// Counters in memory that several processes have mapped: one moves on, others wait for it, awake at first and then asleep.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "pool.h"

namespace pst {

// Whether a counter, which may wrap, has come as far as `turn`.
inline bool is_there(uint32_t at, uint32_t turn) { return int32_t(at - turn) >= 0; }

// Whoever moves on looks at `sleepers` after it; whoever sleeps counts itself before the kernel compares.
inline void move_on(uint32_t& counter, uint32_t& sleepers, uint32_t turn) {
    __atomic_store_n(&counter, turn, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &counter, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

// Nanoseconds that it took until the counter was there; 0: it was at the first look.
inline int64_t await(uint32_t& counter, uint32_t& sleepers, uint32_t turn, int64_t spin_ns) {
    if (is_there(__atomic_load_n(&counter, __ATOMIC_ACQUIRE), turn)) return 0;
    const int64_t began = now_ns();
    do {
        for (int i = 0; i < 64; i++) {
            if (is_there(__atomic_load_n(&counter, __ATOMIC_ACQUIRE), turn)) return now_ns() - began;
            relax();
        }
    } while (now_ns() < began + spin_ns);
    __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
    for (uint32_t seen; !is_there(seen = __atomic_load_n(&counter, __ATOMIC_SEQ_CST), turn);)
        syscall(SYS_futex, &counter, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
    return now_ns() - began;
}

}  // namespace pst
