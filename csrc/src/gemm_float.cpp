// What rows and weights of floating-point formats become, and which kernel multiplies them.
#include "gemm_float.h"

#include <cstring>

namespace pst {

namespace {

void prepare_f32(const float* x, int cols, int, uint8_t* data) {
    size_t bytes = size_t(cols) * 4;
    std::memcpy(data, x, bytes);
    std::memset(data + bytes, 0, size_t(float_row_bytes(cols, 0)) - bytes);
}

#if defined(PST_BF16_PAIRS)

using BFloat16Rows = PairedWeights;

int64_t bf16_row_bytes(int cols, int) { return (int64_t(cols) * 2 + 63) / 64 * 64; }

void prepare_bf16(const float* x, int cols, int, uint8_t* data) {
    auto* out = reinterpret_cast<uint16_t*>(data);
    int64_t padded = bf16_row_bytes(cols, 0) / 2;
    for (int64_t k = 0; k < padded; k += LANES) {
        int64_t rest = cols - k;
        store_bf16(out + k, rest >= LANES ? load(x + k) : load(x + k, rest > 0 ? int(rest) : 0));
    }
}

#else

using BFloat16Rows = WidenedWeights;

constexpr auto bf16_row_bytes = float_row_bytes;

// Rounded to bfloat16, kept as float32: the product widens both anyway.
void prepare_bf16(const float* x, int cols, int, uint8_t* data) {
    auto* out = reinterpret_cast<float*>(data);
    int64_t padded = float_row_bytes(cols, 0) / 4;
    for (int64_t k = 0; k < padded; k += LANES) {
        int64_t rest = cols - k;
        uint16_t rounded[LANES];
        store_bf16(rounded, rest >= LANES ? load(x + k) : load(x + k, rest > 0 ? int(rest) : 0));
        store(out + k, load_bf16(rounded));
    }
}

#endif

int64_t f16_unpacked_bytes(int cols) { return int64_t(cols) * PANEL * 4; }

void unpack_f16(const Panel& panel, uint8_t* scratch) {
    const auto* in = reinterpret_cast<const uint16_t*>(panel.data);
    auto* out = reinterpret_cast<float*>(scratch);
    for (int64_t i = 0; i < int64_t(panel.cols) * PANEL; i += LANES) store(out + i, load_f16(in + i));
}

const Product PRODUCTS[] = {
    {PST_M_F32, PST_A_F32, TILE_ROWS, float_row_bytes, prepare_f32, float_kernel<Float32Weights>, nullptr,
     nullptr, nullptr, 0},
    {PST_M_F16, PST_A_F32, TILE_ROWS, float_row_bytes, prepare_f32, float_kernel<Float16Weights>,
     f16_unpacked_bytes, unpack_f16, float_kernel<Float32Weights>, 4 * GROUP_ROWS},
    {PST_M_BF16, PST_A_F32, GROUP_ROWS, float_row_bytes, prepare_f32, float_kernel<WidenedWeights>, nullptr,
     nullptr, nullptr, 0},
    {PST_M_BF16, PST_A_BF16, GROUP_ROWS, bf16_row_bytes, prepare_bf16, float_kernel<BFloat16Rows>, nullptr,
     nullptr, nullptr, 0},
};

}  // namespace

const Product* float_product(int32_t format, int32_t act) {
    for (const Product& product : PRODUCTS)
        if (product.format == format && product.act == act) return &product;
    return nullptr;
}

}  // namespace pst
