// A program over buffers of exactly the size it needs, each by itself: a number too far is seen.
#pragma once

#include <memory>
#include <string>

#include "check.h"

struct TinyProgram {
    int32_t max_tokens, max_rows;
    std::vector<Bytes> buffers;
    std::vector<pst_register> registers;
    std::vector<pst_op> ops;
    std::vector<pst_plane> planes;
    int32_t num_groups = 0;
    pst_program* program = nullptr;
    std::string error;

    TinyProgram(int32_t max_tokens, int32_t max_rows) : max_tokens(max_tokens), max_rows(max_rows) {}
    ~TinyProgram() {
        if (program) pst_program_free(program);
    }
    TinyProgram(const TinyProgram&) = delete;

    int32_t capacity(int32_t rows) const { return rows == PST_ROWS_TOKENS ? max_tokens : max_rows; }
    // A register of its own, its numbers NaN: what nobody wrote shows.
    int32_t add(int32_t width, int32_t rows = PST_ROWS_TOKENS) {
        buffers.emplace_back(int64_t(capacity(rows)) * width * 4, 0xff);
        registers.push_back({buffers.back().floats(), width, width, rows});
        return int32_t(registers.size()) - 1;
    }
    // Columns start ... start+width of another.
    int32_t part(int32_t whole, int32_t start, int32_t width) {
        pst_register r = registers[size_t(whole)];
        registers.push_back({r.data + start, r.stride, width, r.rows});
        return int32_t(registers.size()) - 1;
    }
    pst_op& op(int32_t kind, std::vector<int32_t> in, int32_t out, std::vector<int32_t> n = {},
               std::vector<float> f = {}, std::vector<const void*> p = {}) {
        pst_op made{};
        made.kind = kind;
        made.out = out;
        for (int32_t& number : made.in) number = -1;
        for (size_t i = 0; i < in.size(); i++) made.in[i] = in[i];
        for (size_t i = 0; i < n.size(); i++) made.n[i] = n[i];
        for (size_t i = 0; i < f.size(); i++) made.f[i] = f[i];
        for (size_t i = 0; i < p.size(); i++) made.p[i] = p[i];
        ops.push_back(made);
        return ops.back();
    }
    // For pools of at most `threads`. False, and a sentence in `error`, if something does not fit.
    bool make(int32_t threads) {
        char text[300] = "";
        int32_t planes_of[] = {0, int32_t(planes.size())};
        program = pst_program_new(ops.data(), int32_t(ops.size()), registers.data(), int32_t(registers.size()),
                                  planes.data(), planes_of, num_groups, max_tokens, max_rows, threads, text,
                                  sizeof text);
        error = text;
        return program != nullptr;
    }
    int32_t run(pst_pool* pool, const pst_step& step) {
        return pst_program_run(program, pool, &step, 0, int32_t(ops.size()));
    }
    // The first `count` rows of a register, one after the other.
    Numbers rows(int32_t number, int32_t count) const {
        pst_register r = registers[size_t(number)];
        Numbers out;
        for (const float* row = r.data; count--; row += r.stride) out.insert(out.end(), row, row + r.width);
        note(out.data(), out.size() * sizeof(float));
        return out;
    }
};

// Bit for bit: a NaN equals itself.
inline bool same(const Numbers& a, const Numbers& b) {
    return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(float));
}
