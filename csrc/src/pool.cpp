#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <new>

namespace pst {

namespace {

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

// Until `word` is no longer `value`: spin for `spin_ns`, then sleep. Whoever changes the word looks at `sleepers`
// after it; whoever sleeps counts itself before the kernel compares. So no wake-up is lost.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int32_t>& sleepers, int64_t spin_ns) {
    // A look at the clock costs as much as some twenty pauses.
    int64_t until = 0;
    for (int round = 0;; round++) {
        for (int i = 0; i < 32; i++) {
            if (word.load(std::memory_order_acquire) != value) return;
            relax();
        }
        int64_t now = now_ns();
        if (!until) until = now + spin_ns;
        if (now >= until) break;
    }
    sleepers.fetch_add(1);
    while (word.load() == value) futex_wait(word, value);
    sleepers.fetch_sub(1);
}

void change(std::atomic<uint32_t>& word, std::atomic<int32_t>& sleepers) {
    word.fetch_add(1);
    if (sleepers.load()) futex_wake_all(word);
}

struct Start {
    pst_pool* pool;
    int id;
};

void pin_to(int index) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || index--) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
}

void* worker(void* p) {
    Start start = *static_cast<Start*>(p);
    delete static_cast<Start*>(p);
    pst_pool* pool = start.pool;
    if (pool->pin) pin_to(start.id);
    uint32_t seen = 0;
    for (;;) {
        wait_while(pool->jobs, seen, pool->waiting, pool->shared.spin_ns);
        seen++;
        if (!pool->work) return nullptr;
        Team team(start.id, pool->threads, &pool->shared);
        pool->work(team, pool->argument);
        team.barrier();
    }
}

}  // namespace

void Team::barrier() {
    asked = 0;
    if (size == 1) return;
    uint32_t generation = shared->generation.load(std::memory_order_relaxed);
    if (shared->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
        shared->arrived.store(0, std::memory_order_relaxed);
        for (int i = 0; i < size; i++) shared->shares[size_t(i)].taken.store(0, std::memory_order_relaxed);
        change(shared->generation, shared->sleepers);
        return;
    }
    wait_while(shared->generation, generation, shared->sleepers, shared->spin_ns);
}

}  // namespace pst

void pst_pool::run(pst::Work todo, void* with) {
    bool alone = threads == 1 || getpid() != owner;
    pst::Team team(0, alone ? 1 : threads, &shared);
    if (alone) {
        todo(team, with);
        return;
    }
    work = todo;
    argument = with;
    pst::change(jobs, waiting);
    todo(team, with);
    team.barrier();
}

extern "C" {

pst_pool* pst_pool_new(int32_t threads, int32_t spin_us, int32_t pin) {
    if (threads < 1 || threads > 1024) return nullptr;
    pst_pool* pool = new (std::nothrow) pst_pool;
    if (!pool) return nullptr;
    pool->threads = threads;
    pool->pin = pin != 0;
    pool->owner = getpid();
    pool->shared.size = threads;
    pool->shared.shares.reset(new (std::nothrow) pst::Share[size_t(threads)]);
    if (!pool->shared.shares) {
        delete pool;
        return nullptr;
    }
    pool->shared.spin_ns = int64_t(spin_us) * 1000;
    // Signals are the business of the process's main thread.
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    bool complete = true;
    for (int i = 1; i < threads && complete; i++) {
        pthread_t thread;
        auto* start = new pst::Start{pool, i};
        complete = pthread_create(&thread, nullptr, pst::worker, start) == 0;
        if (complete) pool->workers.push_back(thread);
        else delete start;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!complete) {
        pst_pool_free(pool);
        return nullptr;
    }
    // Last: a new thread inherits what its maker is pinned to, and would see no other processor.
    if (pool->pin) pst::pin_to(0);
    return pool;
}

void pst_pool_free(pst_pool* pool) {
    if (!pool) return;
    if (getpid() == pool->owner) {
        pool->work = nullptr;
        pst::change(pool->jobs, pool->waiting);
        for (pthread_t thread : pool->workers) pthread_join(thread, nullptr);
    }
    delete pool;
}

int32_t pst_pool_threads(const pst_pool* pool) { return pool->threads; }

void pst_pool_watch(pst_pool* pool, uint64_t* progress) { pool->progress = progress; }

}  // extern "C"
