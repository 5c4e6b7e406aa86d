// Rows made ready for products with integer weights.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace pst {

// Inputs of a row, zeros behind them included, of PST_M_I8 (group 0) and PST_M_I4.
inline int64_t padded_inputs(int cols, int group) {
    int64_t unit = group ? group : 4;
    return (cols + unit - 1) / unit * unit;
}

void prepare_s8(const float* x, int cols, int group, uint8_t* data, float* scale, int32_t* sums);
void prepare_f32(const float* x, int cols, int group, uint8_t* data, float* scale, int32_t* sums);
void prepare_bf16(const float* x, int cols, int group, uint8_t* data, float* scale, int32_t* sums);
// Rounded to bfloat16, kept as float32: for processors without bfloat16 products.
void prepare_rounded(const float* x, int cols, int group, uint8_t* data, float* scale, int32_t* sums);

}  // namespace pst
