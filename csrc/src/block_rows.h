// Rows made ready for products with PST_M_BLOCK.
#pragma once

#include <cstdint>

#include "block.h"

namespace pst {

inline int64_t upto64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Where a prepared row keeps what: values, then the scale of each block, then of each stretch that zeros share its sum,
// as a whole number and as what it stands for. There is room to read a chunk's worth of each from every chunk on.
struct BlockRow {
    int32_t block;    // inputs that share a scale; 0: rows are floats
    int32_t stretch;  // inputs of a sum; 0: all of the row
    int64_t inputs;   // padded
    int64_t scales_at, sums_at, totals_at, bytes;

    BlockRow(int cols, int group, int item) {
        block = item == 1 ? (group == 64 || group == 128 ? group : UNIT) : 0;
        stretch = item == 1 ? (group == 16 ? 16 : block) : group;
        const int64_t unit = std::max(UNIT, group);
        inputs = (cols + unit - 1) / unit * unit;
        const int64_t blocks = block ? inputs / block : 0, stretches = stretch ? inputs / stretch : 1;
        constexpr int64_t ROOM = 16 * 4;
        scales_at = upto64(inputs * item);
        sums_at = scales_at + (block ? upto64(blocks * 4) + ROOM : 0);
        totals_at = sums_at + (block ? upto64(stretches * 4) + ROOM : 0);
        // Behind the totals the total of all.
        bytes = totals_at + upto64((stretches + 1) * 4) + ROOM;
    }
    int64_t stretches() const { return stretch ? inputs / stretch : 1; }
};

// A group whose rows are those of `group`: what several matrices want is made once.
inline int32_t group_of_rows(int cols, int group, int32_t act) {
    if (act != PST_A_I8) return group;
    return !group || (group == CHUNK && cols % CHUNK == 0) ? UNIT : group;
}

void prepare_blocks_s8(const float* x, int cols, int group, uint8_t* data);
void prepare_blocks_f32(const float* x, int cols, int group, uint8_t* data);
void prepare_blocks_bf16(const float* x, int cols, int group, uint8_t* data);
// Rounded to bfloat16, kept as float32.
void prepare_blocks_rounded(const float* x, int cols, int group, uint8_t* data);

}  // namespace pst
