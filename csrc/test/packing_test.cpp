// Packing and unpacking of every format: what panels hold, and that no byte of them is left to chance.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "simd.h"

namespace {

constexpr int ROWS = 70, PANELS = 2;

struct Format {
    int32_t format, group;
};
constexpr Format FORMATS[] = {{PST_M_F32, 0},  {PST_M_F16, 0},  {PST_M_BF16, 0},  {PST_M_I8, 0},
                              {PST_M_I4, 32}, {PST_M_I4, 64}, {PST_M_I4, 128}};

// What `format` may change in x, of a row that reaches 1: nothing, half a last place, half a step, two steps of 4 bits
// (whose scales may be chosen to cut off the largest).
float loss(int32_t format, float x) {
    switch (format) {
        case PST_M_F32: return 0;
        case PST_M_F16: return std::fabs(x) / 2048 + 1e-7f;
        case PST_M_BF16: return std::fabs(x) / 256;
        case PST_M_I8: return 1.0f / 254 + 1e-6f;
        default: return 2.0f / 8;
    }
}

struct Source {
    int32_t dtype;
    int64_t cols;
    Bytes bytes;
    Numbers values;

    Source(int32_t dtype, int32_t cols, const Numbers& x)
        : dtype(dtype), cols(cols), bytes(int64_t(x.size()) * (dtype == PST_F32 ? 4 : 2)), values(x) {
        auto* halves = reinterpret_cast<uint16_t*>(bytes.data);
        for (size_t i = 0; i < x.size(); i++) {
            if (dtype == PST_F32) bytes.floats()[i] = x[i];
            else halves[i] = dtype == PST_F16 ? pst::f32_to_f16(x[i]) : pst::f32_to_bf16(x[i]);
            if (dtype == PST_F16) values[i] = pst::f16_to_f32(halves[i]);
            if (dtype == PST_BF16) values[i] = pst::bf16_to_f32(halves[i]);
        }
    }
    const void* row(int64_t i) const { return bytes.data + i * cols * (dtype == PST_F32 ? 4 : 2); }
};

pst_matrix matrix_of(int32_t format, int32_t cols, int32_t group) {
    pst_matrix m{};
    m.format = format, m.act = PST_A_F32, m.rows = ROWS, m.cols = cols, m.group = group;
    return m;
}

void pack_one(Format f, int32_t cols, const Source& source) {
    pst_matrix m = matrix_of(f.format, cols, f.group);
    int64_t bytes = pst_panel_bytes(&m), scale_bytes = pst_panel_scale_bytes(&m);
    const void* row_of[64 * PANELS];
    for (int i = 0; i < 64 * PANELS; i++) row_of[i] = i < ROWS ? source.row(i) : nullptr;
    Bytes once(bytes * PANELS, 0x5a), scales(scale_bytes * PANELS + 1, 0x5a);
    int32_t failed = pst_pack(&m, source.dtype, row_of, 0, PANELS, once.data, scales.data);
    EXPECT(!failed, "packing of format %d", f.format);
    if (failed) return;
    // Each panel by itself, the last first, into other memory: every byte is written, and is the same.
    Bytes again(bytes * PANELS, 0xc3), again_scales(scale_bytes * PANELS + 1, 0xc3);
    for (int p = PANELS - 1; p >= 0; p--)
        pst_pack(&m, source.dtype, row_of, p, p + 1, again.data, again_scales.data);
    EXPECT(!std::memcmp(once.data, again.data, once.size), "panels of format %d, %d columns", f.format, cols);
    EXPECT(!std::memcmp(scales.data, again_scales.data, scales.size - 1), "scales of format %d", f.format);
    EXPECT(scales.data[scales.size - 1] == 0x5a, "nothing behind the scales");

    m.data = once.data;
    m.scales = scales.data;
    for (int p = 0; p < PANELS; p++) {
        Bytes out(64 * int64_t(cols) * 4);
        EXPECT(!pst_unpack(&m, p, out.floats()), "unpacking of format %d", f.format);
        for (int j = 0; j < 64; j++)
            for (int k = 0; k < cols; k++) {
                int row = 64 * p + j;
                float actual = out.floats()[j * cols + k];
                float x = row < ROWS ? source.values[size_t(row * cols + k)] : 0.0f;
                EXPECT(std::fabs(actual - x) <= loss(f.format, x), "format %d, row %d, column %d: %g, not %g", f.format,
                       row, k, double(actual), double(x));
            }
    }
    Bytes unused(64 * int64_t(cols) * 4);
    EXPECT(pst_unpack(&m, PANELS, unused.floats()) == -1 && pst_unpack(&m, -1, unused.floats()) == -1, "no such panel");
}

void refusals() {
    auto bytes = [](int32_t format, int32_t cols, int32_t group) {
        const pst_matrix m = matrix_of(format, cols, group);
        return pst_panel_bytes(&m);
    };
    EXPECT(bytes(99, 8, 0) == -1 && bytes(-1, 8, 0) == -1, "no such format");
    EXPECT(bytes(PST_M_F32, 0, 0) == -1 && bytes(PST_M_F32, -8, 0) == -1, "no columns");
    EXPECT(bytes(PST_M_I4, 64, 16) == -1 && bytes(PST_M_I4, 64, 0) == -1, "no such group");
    const pst_matrix odd = matrix_of(PST_M_I4, 64, 48), unknown = matrix_of(77, 4, 0), plain = matrix_of(PST_M_F32, 4, 0);
    EXPECT(pst_panel_scale_bytes(&odd) == -1 && pst_panel_scale_bytes(&unknown) == -1, "nor scales of it");
    const void* row_of[64] = {};
    Bytes room(64 * 64 * 4);
    EXPECT(pst_pack(&plain, PST_I8, row_of, 0, 1, room.data, nullptr) == -1, "no such source");
    EXPECT(pst_pack(&unknown, PST_F32, row_of, 0, 1, room.data, nullptr) == -1, "no such format");
}

}  // namespace

void test_packing() {
    Dice dice{11};
    for (Format f : FORMATS)
        for (int32_t cols : {1, 7, 32, 33, 100, 129})
            for (int32_t dtype : {PST_F32, PST_F16, PST_BF16}) {
                Numbers x = dice.reals(size_t(ROWS * cols));
                std::fill_n(x.begin() + 3 * cols, cols, 0.0f);  // a row that has no largest number
                pack_one(f, cols, Source(dtype, cols, x));
            }
    refusals();
}
