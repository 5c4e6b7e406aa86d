// Panels of every format, by the format: how large they are, filling them, and what they stand for.
#include <vector>

#include "block.h"
#include "kernels.h"
#include "simd.h"

namespace pst {

void matrix_row(const pst_matrix& m, int64_t output, float* out) {
    const int64_t panel = output / PANEL, j = output % PANEL;
    const auto* data = static_cast<const uint8_t*>(m.data) + panel * pst_panel_bytes(&m);
    const auto* wide = reinterpret_cast<const float*>(data);
    const auto* half = reinterpret_cast<const uint16_t*>(data);
    BlockShape shape;
    if (block_shape(m, shape)) return block_values(shape, data, int(j), out);
    const auto* scales = static_cast<const uint8_t*>(m.scales) + panel * pst_panel_scale_bytes(&m);
    for (int64_t k = 0; k < m.cols; k++) {
        switch (m.format) {
            case PST_M_F32: out[k] = wide[k * PANEL + j]; break;
            case PST_M_F16: out[k] = f16_to_f32(half[k * PANEL + j]); break;
            case PST_M_BF16: out[k] = bf16_to_f32(half[(k / 2 * PANEL + j) * 2 + k % 2]); break;
            case PST_M_I8:
                out[k] = float(data[(k / 4 * PANEL + j) * 4 + k % 4] - 128) * reinterpret_cast<const float*>(scales)[j];
                break;
            default: {
                const int byte = data[(k / 8 * PANEL + j) * 4 + k % 4];
                const uint16_t scale = reinterpret_cast<const uint16_t*>(scales)[k / m.group * PANEL + j];
                out[k] = float((k & 4 ? byte >> 4 : byte & 15) - 8) * f16_to_f32(scale);
            }
        }
    }
}

}  // namespace pst

extern "C" {

int64_t pst_panel_bytes(const pst_matrix* m) {
    if (m->cols <= 0) return -1;
    const int64_t k = m->cols, group = m->group;
    switch (m->format) {
        case PST_M_F32: return k * 256;
        case PST_M_F16: return k * 128;
        case PST_M_BF16: return (k + 1) / 2 * 256;
        case PST_M_I8: return (k + 3) / 4 * 256;
        case PST_M_I4:
            if (group != 32 && group != 64 && group != 128) return -1;
            return (k + group - 1) / group * group / 8 * 256;
    }
    pst::BlockShape shape;
    return pst::block_shape(*m, shape) ? shape.panel_bytes() : -1;
}

int64_t pst_panel_scale_bytes(const pst_matrix* m) {
    if (pst_panel_bytes(m) < 0) return -1;
    if (m->format == PST_M_I8) return 256;
    return m->format == PST_M_I4 ? int64_t((m->cols + m->group - 1) / m->group) * 128 : 0;
}

int32_t pst_pack(const pst_matrix* m, int32_t dtype, const void* const* row_of, int32_t first, int32_t last, void* data,
                 void* scales) {
    const int64_t bytes = pst_panel_bytes(m), scale_bytes = pst_panel_scale_bytes(m);
    if (bytes < 0 || dtype < PST_F32 || dtype > PST_BF16) return -1;
    pst::BlockShape shape;
    const bool block = pst::block_shape(*m, shape);
    for (int64_t p = first; p < last; p++) {
        uint8_t* to = static_cast<uint8_t*>(data) + p * bytes;
        uint8_t* to_scales = scales ? static_cast<uint8_t*>(scales) + p * scale_bytes : nullptr;
        const void* const* from = row_of + p * pst::PANEL;
        const bool known = block ? pst::pack_rounded(shape, dtype, from, to)
                                 : pst::pack_float(m->format, m->cols, dtype, from, to) ||
                                       pst::pack_int(m->format, m->cols, m->group, dtype, from, to, to_scales);
        if (!known) return -1;
    }
    return 0;
}

int32_t pst_pack_codes(const pst_matrix* m, const void* const* codes, const void* const* scales,
                       const void* const* supers, const void* const* zeros, const void* const* super_zeros,
                       int32_t first, int32_t last, void* data, void*) {
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
    if (pst_panel_scale_bytes(m) && !m->scales) return -1;
    for (int64_t j = 0; j < pst::PANEL; j++)
        pst::matrix_row(*m, int64_t(panel) * pst::PANEL + j, out + j * m->cols);
    return 0;
}

}  // extern "C"
