// Panels of every format, by the format: what fits, how large they are, filling them, and what they stand for.
#include <cmath>

#include "block.h"
#include "kernels.h"
#include "ops.h"
#include "simd.h"

namespace pst {

void matrix_row(const pst_matrix& m, int64_t output, float* out) {
    const int64_t panel = output / PANEL, j = output % PANEL;
    const auto* data = static_cast<const uint8_t*>(m.data) + panel * pst_panel_bytes(&m);
    const auto* wide = reinterpret_cast<const float*>(data);
    const auto* half = reinterpret_cast<const uint16_t*>(data);
    BlockShape shape;
    if (block_shape(m, shape)) return block_values(shape, data, int(j), out);
    for (int64_t k = 0; k < m.cols; k++) {
        switch (m.format) {
            case PST_M_F32: out[k] = wide[k * PANEL + j]; break;
            case PST_M_F16: out[k] = f16_to_f32(half[k * PANEL + j]); break;
            default: out[k] = bf16_to_f32(half[(k / 2 * PANEL + j) * 2 + k % 2]);
        }
    }
}

void check_matrix(const pst_matrix& m) {
    check(m.cols > 0 && m.rows > 0, "a matrix needs rows and columns");
    check(pst_panel_bytes(&m) > 0, "no format of matrices has this number or these groups");
    check(m.format == PST_M_BLOCK || !m.group, "only codes have groups");
    check(m.data && reinterpret_cast<uintptr_t>(m.data) % 64 == 0, "the weights are missing or not aligned to 64 bytes");
    check(!m.pair || m.rows % 2 == 0, "a pair has as many gates as ups");
    if (m.format != PST_M_BLOCK) return;
    const bool looked_up = m.code == PST_C_T4 || m.code == PST_C_F4;
    check(looked_up == (m.table != nullptr), "codes of 16 values need their table, others have none");
    for (int i = 0; m.code == PST_C_T4 && i < 16; i++)
        check(m.table[i] >= -128 && m.table[i] <= 127 && m.table[i] == std::floor(m.table[i]),
              "a table of integers has values of -128 ... 127");
    check(m.offset >= 0 && m.offset <= 255, "the code of zero is 0 ... 255");
    check(!m.offset || (m.code <= PST_C_U2 && m.zero == PST_Z_NONE), "codes have an offset or zeros, not both");
    for (int32_t i = 0; m.order && i < m.cols; i++)
        check(m.order[i] >= 0 && m.order[i] < m.cols, "an order names inputs that there are not");
}

}  // namespace pst

extern "C" {

int64_t pst_panel_bytes(const pst_matrix* m) {
    if (m->cols <= 0) return -1;
    const int64_t k = m->cols;
    switch (m->format) {
        case PST_M_F32: return k * 256;
        case PST_M_F16: return k * 128;
        case PST_M_BF16: return (k + 1) / 2 * 256;
    }
    pst::BlockShape shape;
    return pst::block_shape(*m, shape) ? shape.panel_bytes() : -1;
}

int32_t pst_pack(const pst_matrix* m, int32_t dtype, const void* const* row_of, int32_t first, int32_t last, void* data) {
    const int64_t bytes = pst_panel_bytes(m);
    if (bytes < 0 || dtype < PST_F32 || dtype > PST_BF16) return -1;
    pst::BlockShape shape;
    const bool block = pst::block_shape(*m, shape);
    for (int64_t p = first; p < last; p++) {
        uint8_t* to = static_cast<uint8_t*>(data) + p * bytes;
        const void* const* from = row_of + p * pst::PANEL;
        const bool known = block ? pst::pack_rounded(shape, dtype, from, to)
                                 : pst::pack_float(m->format, m->cols, dtype, from, to);
        if (!known) return -1;
    }
    return 0;
}

int32_t pst_pack_codes(const pst_matrix* m, const void* const* codes, const void* const* scales,
                       const void* const* supers, const void* const* zeros, const void* const* super_zeros,
                       int32_t first, int32_t last, void* data) {
    pst::BlockShape shape;
    if (!pst::block_shape(*m, shape)) return -1;
    for (int64_t p = first; p < last; p++) {
        auto of = [at = p * pst::PANEL](const void* const* array) { return array ? array + at : nullptr; };
        const pst::BlockSource from{of(codes), of(scales), of(supers), of(zeros), of(super_zeros)};
        if (!pst::pack_block(shape, from, static_cast<uint8_t*>(data) + p * shape.panel_bytes())) return -1;
    }
    return 0;
}

int32_t pst_unpack(const pst_matrix* m, int32_t panel, float* out) {
    if (pst_panel_bytes(m) < 0 || panel < 0 || panel >= (m->rows + pst::PANEL - 1) / pst::PANEL) return -1;
    for (int64_t j = 0; j < pst::PANEL; j++)
        pst::matrix_row(*m, int64_t(panel) * pst::PANEL + j, out + j * m->cols);
    return 0;
}

}  // extern "C"
