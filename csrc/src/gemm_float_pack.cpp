// Panels of floating-point weights, and back.
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace pst {

namespace {

constexpr int BLOCK = 64;  // inputs turned at once: 16 KB
constexpr int64_t DTYPE_BYTES[] = {4, 2, 2};

// Inputs first ... first+count-1 of 64 outputs as [count][64], with zeros behind the last input and for padding.
void turn(const void* const* row_of, int32_t dtype, int first, int count, int cols, float (*block)[PANEL]) {
    float row[BLOCK];
    for (int j = 0; j < PANEL; j++) {
        int real = !row_of[j] ? 0 : cols - first < count ? cols - first : count;
        std::memset(row, 0, sizeof row);
        if (real) widen(static_cast<const uint8_t*>(row_of[j]) + first * DTYPE_BYTES[dtype], dtype, real, row);
        for (int k = 0; k < count; k++) block[k][j] = row[k];
    }
}

void put_pair(const float* even, const float* odd, uint8_t* out) {
    uint16_t lower[PANEL], upper[PANEL];
    for (int j = 0; j < PANEL; j += LANES) {
        store_bf16(lower + j, load(even + j));
        store_bf16(upper + j, load(odd + j));
    }
    uint32_t pairs[PANEL];
    for (int j = 0; j < PANEL; j++) pairs[j] = lower[j] | uint32_t(upper[j]) << 16;
    std::memcpy(out, pairs, sizeof pairs);
}

}  // namespace

bool pack_float(int32_t format, int cols, int32_t dtype, const void* const* row_of, uint8_t* data) {
    if (format != PST_M_F32 && format != PST_M_F16 && format != PST_M_BF16) return false;
    const int padded = format == PST_M_BF16 ? (cols + 1) / 2 * 2 : cols;
    float block[BLOCK][PANEL];
    for (int first = 0; first < padded; first += BLOCK) {
        int count = padded - first < BLOCK ? padded - first : BLOCK;
        turn(row_of, dtype, first, count, cols, block);
        for (int k = 0; k < count; k++) {
            int64_t at = int64_t(first + k) * PANEL;
            if (format == PST_M_F32) std::memcpy(data + at * 4, block[k], sizeof block[k]);
            else if (format == PST_M_BF16) {
                if (k % 2) put_pair(block[k - 1], block[k], data + (at - PANEL) * 2);
            } else {
                auto* out = reinterpret_cast<uint16_t*>(data) + at;
                for (int j = 0; j < PANEL; j += LANES) store_f16(out + j, load(block[k] + j));
            }
        }
    }
    return true;
}

}  // namespace pst
