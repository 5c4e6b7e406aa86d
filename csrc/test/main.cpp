// The native library's own tests: `tests [brief]`. 0 if all is well.
#include <sys/time.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <new>

#include "check.h"

int failures = 0, shown = 0;
bool brief = false;

namespace {
std::atomic<int64_t> news{0};
}
int64_t allocations() { return news; }

namespace {
uint64_t noted = 14695981039346656037u;
}
void note(const void* results, size_t bytes) {  // FNV-1a
    for (size_t i = 0; i < bytes; i++) noted = (noted ^ static_cast<const uint8_t*>(results)[i]) * 1099511628211u;
}

// Sanitizers have these themselves, and check more with them.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* operator new(size_t size) {
    news++;
    if (void* p = std::malloc(size ? size : 1)) return p;
    throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t align) {
    news++;
    const size_t step = size_t(align);
    if (void* p = std::aligned_alloc(step, (size + step - 1) / step * step)) return p;
    throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
#endif

namespace {

void run(const char* name, void (*test)()) {
    int before = failures;
    shown = 0;
    timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    test();
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = double(end.tv_sec - start.tv_sec) + double(end.tv_nsec - start.tv_nsec) * 1e-9;
    std::printf("%-10s %s  %.2f s\n", name, failures == before ? "ok" : "FAILED", seconds);
    std::fflush(stdout);
}

void test_self() {
    char sentence[300] = "";
    int32_t failed = pst_self_test(sentence, sizeof sentence);
    EXPECT(!failed, "%s", sentence);
    EXPECT(failed || !sentence[0], "no fault, no sentence");
    EXPECT(pst_self_test(nullptr, 0) == failed, "nobody has to listen");
}

}  // namespace

int main(int argc, char** argv) {
    brief = argc > 1 && !std::strcmp(argv[1], "brief");
    std::printf("%s, ABI %d, score %d\n", pst_isa_name(), pst_abi(), pst_score());
    if (pst_abi() != PST_ABI || !pst_score()) {
        std::printf("this processor cannot run the library\n");
        return 1;
    }
    run("self-test", test_self);
    run("packing", test_packing);
    run("blocks", test_blocks);
    run("pool", test_pool);
    run("rows", test_rows);
    run("streams", test_streams);
    run("kv_stream", test_kv_stream);
    run("model", test_model);
    run("lines", test_lines);
    run("experts", test_experts);
    run("latent", test_latent);
    run("choose", test_choose);
    run("states", test_states);
    run("entries", test_entries);
    std::printf("results %016llx\n", static_cast<unsigned long long>(noted));
    std::printf(failures ? "%d FAILED\n" : "all well\n", failures);
    return failures != 0;
}
