// What the tests of the native library share. They are plain programs, so that a sanitizer or an emulator can run them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "penstock.h"

// How often memory was asked for so far; 0 under a sanitizer.
int64_t allocations();
extern int failures;
extern int shown;  // of the test that runs
// Emulators and sanitizers are slow: fewer rounds of the same.
extern bool brief;
// All results go into one number, which libraries that promise the same bits have in common.
void note(const void* results, size_t bytes);

#define EXPECT(condition, ...)                                                  \
    do {                                                                        \
        if (!(condition) && ++failures && ++shown <= 20) {                      \
            std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);         \
            std::printf(__VA_ARGS__);                                           \
            std::printf("\n");                                                  \
        }                                                                       \
    } while (0)

void test_pool();
void test_packing();
void test_blocks();
void test_rows();
void test_streams();
void test_kv_stream();
void test_model();
void test_lines();
void test_experts();
void test_latent();
void test_choose();
void test_states();
void test_entries();

using Numbers = std::vector<float>;

struct Dice {
    uint32_t state;
    uint32_t next() {
        state = state * 1664525u + 1013904223u;
        return state >> 8;
    }
    float real() { return float(int(next() % 2000001) - 1000000) * 1e-6f; }
    Numbers reals(size_t n) {
        Numbers out(n);
        for (float& x : out) x = real();
        return out;
    }
};

// Memory of exactly so many bytes that begins on a cache line and holds `fill`.
struct Bytes {
    uint8_t* data;
    size_t size;
    explicit Bytes(int64_t n, int fill = 0xa5)
        : data(static_cast<uint8_t*>(::operator new(size_t(n), std::align_val_t(64)))), size(size_t(n)) {
        std::memset(data, fill, size);
    }
    Bytes(Bytes&& other) noexcept : data(other.data), size(other.size) { other.data = nullptr; }
    ~Bytes() { ::operator delete(data, std::align_val_t(64)); }
    float* floats() const { return reinterpret_cast<float*>(data); }
};

struct Pair {
    int32_t format, act, code, group, scale, zero, offset;
    bool rounded() const { return format == PST_M_BLOCK; }  // what pst_pack makes of floats
    pst_matrix matrix(int32_t rows, int32_t cols) const {
        pst_matrix m{};
        m.format = format, m.act = act, m.rows = rows, m.cols = cols, m.group = group;
        m.code = code, m.scale = scale, m.zero = zero, m.offset = offset, m.factor = 1.0f;
        return m;
    }
};
constexpr Pair plain(int32_t format, int32_t act) { return {format, act, 0, 0, 0, 0, 0}; }
constexpr Pair rounded8(int32_t act) { return {PST_M_BLOCK, act, PST_C_U8, 0, PST_S_F32, PST_Z_NONE, 128}; }
constexpr Pair rounded4(int32_t act, int32_t group) { return {PST_M_BLOCK, act, PST_C_U4, group, PST_S_F16, PST_Z_NONE, 8}; }
// Pairs of weights and rows: those that floats are packed into.
constexpr Pair PAIRS[] = {plain(PST_M_F32, PST_A_F32),   plain(PST_M_F16, PST_A_F32),  plain(PST_M_BF16, PST_A_F32),
                          plain(PST_M_BF16, PST_A_BF16), rounded8(PST_A_I8),           rounded8(PST_A_F32),
                          rounded8(PST_A_BF16),          rounded4(PST_A_I8, 32),       rounded4(PST_A_I8, 64),
                          rounded4(PST_A_F32, 32),       rounded4(PST_A_BF16, 128)};
