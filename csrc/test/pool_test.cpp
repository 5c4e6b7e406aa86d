// Threads that run together: every piece of work once, everybody's writes seen behind a barrier, no wake-up lost.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "check.h"
#include "pool.h"

namespace {

// Two rounds of work with a barrier between them. The numbers are not atomic: a piece that two threads take, or a
// barrier that lets one through too early, is a race that a sanitizer sees, and usually a wrong sum.
struct Rounds {
    int64_t count, grain;
    std::vector<int64_t> first, second;
    std::vector<int64_t> of_thread;

    Rounds(int64_t count, int64_t grain, int threads)
        : count(count), grain(grain), first(size_t(count)), second(size_t(count)), of_thread(size_t(threads)) {}

    static void work(pst::Team& team, void* argument) {
        auto& own = *static_cast<Rounds*>(argument);
        for (int64_t from, to; team.next(own.grain, own.count, from, to);)
            for (int64_t i = from; i < to; i++) own.first[size_t(i)] += i;
        team.barrier();
        int64_t total = 0;
        for (int64_t x : own.first) total += x;
        own.of_thread[size_t(team.id)] = total;
        for (int64_t from, to; team.next(1, own.count, from, to);)
            for (int64_t i = from; i < to; i++) own.second[size_t(i)] += own.first[size_t(own.count - 1 - i)];
    }
    void check(int64_t jobs, int threads) {
        int64_t sum = count * (count - 1) / 2;
        for (int t = 0; t < threads; t++)
            EXPECT(of_thread[size_t(t)] == jobs * sum, "thread %d of %d saw all of job %ld", t, threads, long(jobs));
        for (int64_t i = 0; i < count; i++) {
            EXPECT(first[size_t(i)] == jobs * i, "piece %ld in job %ld", long(i), long(jobs));
            EXPECT(second[size_t(i)] == jobs * (jobs + 1) / 2 * (count - 1 - i), "piece %ld behind it", long(i));
        }
    }
};

void tiny_jobs() {
    const int jobs = brief ? 60 : 800;
    for (int threads = 1; threads <= 8; threads++)
        for (int spin_us : {0, 50}) {
            pst_pool* pool = pst_pool_new(threads, spin_us, 0);
            EXPECT(pool && pst_pool_threads(pool) == threads, "%d threads", threads);
            Rounds rounds(37, 3, threads);
            for (int job = 1; job <= jobs; job++) {
                pool->run(Rounds::work, &rounds);
                if (job == 1 || job == jobs) rounds.check(job, threads);
            }
            pst_pool_free(pool);
        }
}

// Shares of one job: who took what, and one thread that does not get on.
struct Shares {
    int64_t count, grain;
    bool stuck;  // thread 0 keeps its first piece until all others are done
    std::vector<int> taken_by;
    std::vector<int64_t> first_piece, own_piece;
    std::atomic<int64_t> left;

    Shares(int64_t count, int64_t grain, int threads, bool stuck)
        : count(count), grain(grain), stuck(stuck), taken_by(size_t(count), -1), first_piece(size_t(threads), -1), own_piece(size_t(threads), -1),
          left((count + grain - 1) / grain) {}

    static void work(pst::Team& team, void* argument) {
        auto& own = *static_cast<Shares*>(argument);
        const int64_t pieces = (own.count + own.grain - 1) / own.grain;
        const bool waits = own.stuck && team.id == 0 && team.size > 1;
        for (int64_t from, to; team.next(own.grain, own.count, from, to);) {
            int64_t& first = own.first_piece[size_t(team.id)];
            if (first < 0) first = from / own.grain;
            for (int64_t i = from; i < to; i++) own.taken_by[size_t(i)] = team.id;
            own.left -= (to - from + own.grain - 1) / own.grain;
            while (waits && own.left) std::this_thread::yield();
        }
        own.own_piece[size_t(team.id)] = team.own_piece(pieces);
    }
    void check() const {
        for (int64_t i = 0; i < count; i++) EXPECT(taken_by[size_t(i)] >= 0, "piece %ld of %ld", long(i), long(count));
        for (size_t t = 0; t < own_piece.size(); t++) {
            const int64_t own = own_piece[t];
            const bool helped = own >= 0 && taken_by[size_t(own * grain)] != int(t);
            EXPECT(own < 0 || helped || first_piece[t] == own, "thread %d began with piece %ld", int(t), long(first_piece[t]));
        }
    }
};

void shares() {
    for (int threads = 1; threads <= 5; threads++)
        for (int64_t count : {1, 4, 23, 200})
            for (int64_t grain : {1, 3}) {
                pst_pool* pool = pst_pool_new(threads, 50, 0);
                Shares plain(count, grain, threads, false), stuck(count, grain, threads, true);
                pool->run(Shares::work, &plain);
                plain.check();
                if ((count + grain - 1) / grain >= threads) {  // with fewer, thread 0 may have no share to be stuck in
                    pool->run(Shares::work, &stuck);
                    stuck.check();
                    EXPECT(stuck.left == 0, "%d threads: nobody helped with %ld pieces", threads, long(stuck.left));
                }
                pst_pool_free(pool);
            }
}

// Long enough between jobs for the threads to sleep, and just about long enough: the moment when wake-ups get lost.
void jobs_after_pauses() {
    for (int pause_us : {0, 20, 50, 80, 2000}) {
        pst_pool* pool = pst_pool_new(3, 50, 0);
        Rounds rounds(5, 1, 3);
        const int jobs = brief ? 10 : 100;
        for (int job = 1; job <= jobs; job++) {
            pool->run(Rounds::work, &rounds);
            usleep(useconds_t(pause_us));
        }
        rounds.check(jobs, 3);
        pst_pool_free(pool);
    }
}

void nothing_to_do() {
    for (int i = 0; i < (brief ? 5 : 100); i++) pst_pool_free(pst_pool_new(1 + i % 4, i % 3 * 10, 0));
    pst_pool* pool = pst_pool_new(3, 0, 0);
    Rounds none(0, 1, 3);
    for (int i = 0; i < 20; i++) pool->run(Rounds::work, &none);
    pst_pool_free(pool);
    pst_pool_free(nullptr);
    for (int threads : {0, -1, 1025}) EXPECT(!pst_pool_new(threads, 0, 0), "%d threads", threads);
}

void two_pools_at_once() {
    auto use = [] {
        pst_pool* pool = pst_pool_new(3, 5, 0);
        Rounds rounds(11, 2, 3);
        const int jobs = brief ? 30 : 500;
        for (int job = 1; job <= jobs; job++) pool->run(Rounds::work, &rounds);
        rounds.check(jobs, 3);
        pst_pool_free(pool);
    };
    std::thread other(use);
    use();
    other.join();
}

// A job may come from another thread than the last one's.
void callers_take_turns() {
    pst_pool* pool = pst_pool_new(2, 5, 0);
    Rounds rounds(11, 2, 2);
    for (int job = 1; job <= 20; job++) std::thread([&] { pool->run(Rounds::work, &rounds); }).join();
    rounds.check(20, 2);
    pst_pool_free(pool);
}

// A forked process has no workers: the caller does it all, and may free its copy.
void forked() {
    pst_pool* pool = pst_pool_new(4, 0, 0);
    Rounds rounds(9, 1, 4);
    pool->run(Rounds::work, &rounds);
    std::fflush(stdout);
    pid_t child = fork();
    if (!child) {
        pool->run(Rounds::work, &rounds);
        bool good = rounds.of_thread[0] == 2 * 36 && rounds.first[8] == 16 && rounds.second[0] == 8 + 16;
        pst_pool_free(pool);
        _exit(good ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT(status == 0, "status %d of the forked process", status);
    pool->run(Rounds::work, &rounds);
    rounds.check(2, 4);
    pst_pool_free(pool);
}

void where_am_i(pst::Team& team, void* argument) {
    cpu_set_t own;
    sched_getaffinity(0, sizeof own, &own);
    int only = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &own)) only = CPU_COUNT(&own) == 1 ? cpu : -1;
    static_cast<int*>(argument)[team.id] = only;
}

void pinned() {
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof before, &before) || CPU_COUNT(&before) < 2) return;
    int cpus[2] = {-1, -1};
    pst_pool* pool = pst_pool_new(2, 0, 1);
    pool->run(where_am_i, cpus);
    pst_pool_free(pool);
    sched_setaffinity(0, sizeof before, &before);
    EXPECT(cpus[0] >= 0 && cpus[1] >= 0 && cpus[0] != cpus[1], "threads on processors %d and %d", cpus[0], cpus[1]);
}

void bandwidth() {
    pst_pool* pool = pst_pool_new(2, 0, 0);
    std::vector<uint64_t> words(20011);
    uint64_t expected = 0;
    for (size_t i = 0; i < words.size(); i++) expected += words[i] = i * 2654435761u;
    EXPECT(pst_read(pool, words.data(), int64_t(words.size() * 8)) == expected, "all of it is read, once");
    EXPECT(pst_read(pool, words.data(), 0) == 0, "nothing is nothing");
    pst_pool_free(pool);
}

void multiplying() {
    pst_pool *one = pst_pool_new(1, 0, 0), *two = pst_pool_new(2, 0, 0);
    for (int format : {PST_M_F32, PST_M_BF16, PST_M_BLOCK})
        for (int act : {PST_A_F32, PST_A_BF16, PST_A_I8}) {
            if (pst_multiply(one, format, act, 1) < 0) continue;
            const int64_t done = pst_multiply(one, format, act, 3);
            EXPECT(done > 0 && done % (3 * 16 * 2) == 0, "%d rounds of %d", int(done), format);
            EXPECT(pst_multiply(two, format, act, 3) == 2 * done, "every thread does all rounds");
        }
    EXPECT(pst_multiply(one, PST_M_BLOCK, PST_A_I8, 1) > 0 && pst_multiply(one, PST_M_F32, PST_A_F32, 1) > 0, "they exist");
    EXPECT(pst_multiply(one, PST_M_F32, PST_A_I8, 1) == -1, "there is no such product");
    EXPECT(pst_multiply(one, PST_M_F32, PST_A_F32, 0) == -1, "no round at all");
    pst_pool_free(one);
    pst_pool_free(two);
}

}  // namespace

void test_pool() {
    tiny_jobs();
    shares();
    jobs_after_pauses();
    nothing_to_do();
    two_pools_at_once();
    callers_take_turns();
    forked();
    pinned();
    bandwidth();
    multiplying();
}
