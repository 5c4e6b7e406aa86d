// What the parts of the self-test share.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "kernels.h"
#include "ops.h"

namespace pst {

using Numbers = std::vector<float>;

// Numbers without order, the same on every machine.
struct Dice {
    uint32_t state;
    int whole(int low, int high) {
        state = state * 1664525u + 1013904223u;
        return low + int((state >> 8) % uint32_t(high - low + 1));
    }
    float real() { return float(whole(-1000000, 1000000)) * 1e-6f; }
    Numbers reals(size_t n) {
        Numbers out(n);
        for (float& x : out) x = real();
        return out;
    }
};

// Memory that begins on a cache line, and ends where it is said to: sanitizers see a byte too far.
struct Bytes {
    uint8_t* data;
    explicit Bytes(int64_t n) : data(static_cast<uint8_t*>(::operator new(size_t(n), std::align_val_t(64)))) {
        std::memset(data, 0xa5, size_t(n));  // who reads what nobody wrote is found out
    }
    ~Bytes() { ::operator delete(data, std::align_val_t(64)); }
    Bytes(const Bytes&) = delete;
    float* floats() { return reinterpret_cast<float*>(data); }
};

// "" if |actual - expected| <= bound, else a sentence.
inline std::string off(const std::string& what, double actual, double expected, double bound) {
    if (std::fabs(actual - expected) <= bound) return "";
    char text[200];
    std::snprintf(text, sizeof text, "%s: %.9g, not %.9g", what.c_str(), actual, expected);
    return text;
}

// Registers and operations, run once by the calling thread.
struct Tiny {
    std::vector<Numbers> buffers;
    std::vector<pst_register> registers;
    std::vector<pst_op> ops;
    std::vector<pst_plane> planes;
    int32_t rows;

    explicit Tiny(int32_t rows) : rows(rows) {}
    int32_t add(Numbers values) {
        buffers.push_back(std::move(values));
        int32_t width = int32_t(buffers.back().size()) / rows;
        registers.push_back({buffers.back().data(), width, width, PST_ROWS_TOKENS});
        return int32_t(registers.size()) - 1;
    }
    pst_op& op(int32_t kind, int32_t in0, int32_t in1, int32_t out) {
        pst_op made{};
        made.kind = kind;
        for (int32_t& number : made.in) number = -1;
        made.in[0] = in0, made.in[1] = in1;
        made.out = out;
        ops.push_back(made);
        return ops.back();
    }
    std::string run(const std::string& name, const pst_group* group = nullptr) {
        char error[200] = "";
        int32_t planes_of[] = {0, int32_t(planes.size())}, loc[] = {0, rows};
        pst_program* program =
            pst_program_new(ops.data(), int32_t(ops.size()), registers.data(), int32_t(registers.size()), planes.data(),
                            planes_of, group ? 1 : 0, rows, 1, 1, error, sizeof error);
        if (!program) return name + ": " + error;
        std::vector<int32_t> ids(size_t(rows), 0), positions(size_t(rows), 0);
        for (int32_t i = 0; i < rows; i++) positions[size_t(i)] = i;
        pst_step step{rows, 1, 0, group ? 1 : 0, ids.data(), positions.data(), loc, loc, group, nullptr, nullptr};
        pst_pool alone;  // of the calling thread: none is started
        bool failed = pst_program_run(program, &alone, &step, 0, int32_t(ops.size()));
        pst_program_free(program);
        return failed ? name + ": it did not run" : "";
    }
};

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// selftest_choose.cpp, selftest_experts.cpp, selftest_states.cpp, selftest_streams.cpp, selftest_entries.cpp,
// selftest_text.cpp, selftest_adapt.cpp
std::string choose_fault();
std::string experts_fault();
std::string states_fault();
std::string streams_fault();
std::string entries_fault();
std::string text_fault();
std::string adapters_fault();

}  // namespace pst
