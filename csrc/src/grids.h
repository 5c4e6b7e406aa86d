// Rows of ggml's blocks of 256 whose codes name vectors of a grid, or are digits of another base.
#pragma once

#include <cstdint>

namespace pst {

// Of a code from PST_C_IQ3_S on: bytes of a block, and inputs that share a scale.
int32_t grid_bytes(int32_t code);
int32_t grid_group(int32_t code);

constexpr int GRID_OFFSET = 64;  // numbers of all grids are smaller

// 256 numbers of a block as whole ones, GRID_OFFSET added; and what multiplies them, [256 / group].
void grid_values(int32_t code, const uint8_t* block, uint8_t* values);
void grid_scales(int32_t code, const uint8_t* block, float* scales);

}  // namespace pst
