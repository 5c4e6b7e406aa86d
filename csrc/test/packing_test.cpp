// Packing and unpacking of every format: what panels hold, and that no byte of them is left to chance.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "simd.h"

namespace {

constexpr int ROWS = 70, PANELS = 2;

constexpr Pair FORMATS[] = {plain(PST_M_F32, PST_A_F32),  plain(PST_M_F16, PST_A_F32),  plain(PST_M_BF16, PST_A_F32),
                            rounded8(PST_A_F32),          rounded4(PST_A_F32, 32),      rounded4(PST_A_F32, 64),
                            rounded4(PST_A_F32, 128)};

// What `format` may change in x, of a row that reaches 1: nothing, half a last place, half a step, two steps of 4 bits
// (whose scales may be chosen to cut off the largest).
float loss(Pair kind, float x) {
    switch (kind.format) {
        case PST_M_F32: return 0;
        case PST_M_F16: return std::fabs(x) / 2048 + 1e-7f;
        case PST_M_BF16: return std::fabs(x) / 256;
        default: return kind.code == PST_C_U8 ? 1.0f / 254 + 1e-6f : 2.0f / 8;
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

void pack_one(Pair f, int32_t cols, const Source& source) {
    pst_matrix m = f.matrix(ROWS, cols);
    int64_t bytes = pst_panel_bytes(&m);
    const void* row_of[64 * PANELS];
    for (int i = 0; i < 64 * PANELS; i++) row_of[i] = i < ROWS ? source.row(i) : nullptr;
    Bytes once(bytes * PANELS, 0x5a);
    int32_t failed = pst_pack(&m, source.dtype, row_of, 0, PANELS, once.data);
    EXPECT(!failed, "packing of format %d", f.format);
    if (failed) return;
    note(once.data, once.size);
    // Each panel by itself, the last first, into other memory: every byte is written, and is the same.
    Bytes again(bytes * PANELS, 0xc3);
    for (int p = PANELS - 1; p >= 0; p--) pst_pack(&m, source.dtype, row_of, p, p + 1, again.data);
    EXPECT(!std::memcmp(once.data, again.data, once.size), "panels of format %d, %d columns", f.format, cols);
    m.data = once.data;
    for (int p = 0; p < PANELS; p++) {
        Bytes out(64 * int64_t(cols) * 4);
        EXPECT(!pst_unpack(&m, p, out.floats()), "unpacking of format %d", f.format);
        for (int j = 0; j < 64; j++)
            for (int k = 0; k < cols; k++) {
                int row = 64 * p + j;
                float actual = out.floats()[j * cols + k];
                float x = row < ROWS ? source.values[size_t(row * cols + k)] : 0.0f;
                EXPECT(std::fabs(actual - x) <= loss(f, x), "format %d, row %d, column %d: %g, not %g", f.format,
                       row, k, double(actual), double(x));
            }
    }
    Bytes unused(64 * int64_t(cols) * 4);
    EXPECT(pst_unpack(&m, PANELS, unused.floats()) == -1 && pst_unpack(&m, -1, unused.floats()) == -1, "no such panel");
}

void refusals() {
    auto bytes = [](Pair kind, int32_t cols) {
        const pst_matrix m = kind.matrix(1, cols);
        return pst_panel_bytes(&m);
    };
    auto kind = [](int32_t code, int32_t group, int32_t scale, int32_t zero) {
        return Pair{PST_M_BLOCK, PST_A_F32, code, group, scale, zero, 0};
    };
    EXPECT(bytes(plain(99, 0), 8) == -1 && bytes(plain(-1, 0), 8) == -1 && bytes(plain(3, 0), 8) == -1, "no such format");
    EXPECT(bytes(plain(PST_M_F32, 0), 0) == -1 && bytes(plain(PST_M_F32, 0), -8) == -1, "no columns");
    EXPECT(bytes(kind(PST_C_U4, 48, 0, 0), 96) == -1 && bytes(kind(PST_C_U4, -32, 0, 0), 96) == -1, "no such group");
    EXPECT(bytes(kind(-1, 32, 0, 0), 96) == -1 && bytes(kind(PST_C_TQ1_0 + 1, 0, 0, 0), 256) == -1, "no such code");
    EXPECT(bytes(kind(PST_C_U4, 32, 7, 0), 96) == -1 && bytes(kind(PST_C_U4, 32, 0, 6), 96) == -1, "no such type");
    EXPECT(bytes(kind(PST_C_U4, 0, PST_S_U8_F16, 0), 256) == -1, "supers without groups");
    EXPECT(bytes(kind(PST_C_IQ3_S, 0, 0, 0), 128) == -1, "half a block");
    EXPECT(bytes(kind(PST_C_IQ3_S, 0, PST_S_F16, 0), 256) == -1, "blocks have scales of their own");
    const pst_matrix unknown = plain(77, 0).matrix(1, 4), floats = plain(PST_M_F32, 0).matrix(1, 4);
    const void* row_of[64] = {};
    Bytes room(64 * 64 * 4);
    EXPECT(pst_pack(&floats, PST_I8, row_of, 0, 1, room.data) == -1, "no such source");
    EXPECT(pst_pack(&unknown, PST_F32, row_of, 0, 1, room.data) == -1, "no such format");
    const pst_matrix five = kind(PST_C_U5, 32, PST_S_F16, 0).matrix(1, 32), four = kind(PST_C_U4, 32, PST_S_F16, 0).matrix(1, 32);
    EXPECT(pst_pack(&five, PST_F32, row_of, 0, 1, room.data) == -1, "nothing is rounded to 5 bits");
    EXPECT(pst_pack_codes(&four, row_of, nullptr, nullptr, nullptr, nullptr, 0, 1, room.data) == -1, "no scales");
    EXPECT(pst_pack_codes(&floats, row_of, row_of, nullptr, nullptr, nullptr, 0, 1, room.data) == -1, "no codes");
    uint8_t codes[32] = {16}, scale[2] = {};
    const void *codes_of[64] = {codes}, *scales_of[64] = {scale};
    EXPECT(pst_pack_codes(&four, codes_of, scales_of, nullptr, nullptr, nullptr, 0, 1, room.data) == -1, "5 bits");
}

}  // namespace

void test_packing() {
    Dice dice{11};
    for (Pair f : FORMATS)
        for (int32_t cols : {1, 7, 32, 33, 100, 129})
            for (int32_t dtype : {PST_F32, PST_F16, PST_BF16}) {
                Numbers x = dice.reals(size_t(ROWS * cols));
                std::fill_n(x.begin() + 3 * cols, cols, 0.0f);  // a row that has no largest number
                pack_one(f, cols, Source(dtype, cols, x));
            }
    refusals();
}
