// Codes of every kind in memory of exactly their size: packed, looked up, multiplied in segments, on any number of threads.
#include <cmath>

#include "tiny_program.h"

namespace {

constexpr float TABLE[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int32_t MAX_ROWS = 20, THREADS = 3;

// One matrix of codes at random. Bytes of scales are small: none of them is a NaN of its type.
struct Codes {
    pst_matrix m{};
    Numbers bias;
    std::vector<int32_t> order;
    std::vector<Bytes> sources;
    Bytes data;

    static int64_t item(int32_t scale) { return scale == PST_S_F32 ? 4 : scale <= PST_S_BF16 ? 2 : 1; }
    static int64_t zero_item(int32_t zero) { return zero == PST_Z_U8 || zero == PST_Z_U8_F16 ? 1 : 2; }
    static int64_t block_bytes(int32_t code) {
        constexpr int64_t BYTES[] = {110, 98, 82, 74, 66, 50, 56, 54};
        return BYTES[code - PST_C_IQ3_S];
    }
    static pst_matrix shape(Pair kind, int32_t rows, int32_t cols) {
        pst_matrix made = kind.matrix(rows, cols);
        if (kind.code == PST_C_T4 || kind.code == PST_C_F4) made.table = TABLE;
        return made;
    }

    Codes(Pair kind, int32_t rows, int32_t cols, Dice& dice, bool ordered)
        : m(shape(kind, rows, cols)), bias(size_t((rows + 63) / 64 * 64), 0.25f), data((rows + 63) / 64 * pst_panel_bytes(&m)) {
        constexpr int BITS[] = {8, 6, 5, 4, 3, 2, 4, 4, 7};
        const bool blocks = kind.code > PST_C_E4M3;
        const int64_t groups = kind.group ? (cols + kind.group - 1) / kind.group : 1, chunks = (cols + 255) / 256;
        const int64_t sizes[] = {blocks ? chunks * block_bytes(kind.code) : cols, blocks ? 0 : groups * item(kind.scale),
                                 kind.scale >= PST_S_U8_F16 ? 2 * chunks : 0, kind.zero ? groups * zero_item(kind.zero) : 0,
                                 kind.zero == PST_Z_U8_F16 ? 2 * chunks : 0};
        std::vector<const void*> pointers[5];
        for (int part = 0; part < 5; part++)
            for (int32_t i = 0; i < (rows + 63) / 64 * 64; i++) {
                if (i >= rows || !sizes[part]) {
                    pointers[part].push_back(nullptr);
                    continue;
                }
                sources.emplace_back(sizes[part]);
                const int most = part ? 15 : blocks ? 0x2f : (1 << BITS[kind.code]) - 1 - (kind.code == PST_C_E4M3);
                for (size_t k = 0; k < sources.back().size; k++) sources.back().data[k] = uint8_t(dice.next() % uint32_t(most + 1));
                pointers[part].push_back(sources.back().data);
            }
        auto array = [&](int part) { return sizes[part] ? pointers[part].data() : nullptr; };
        EXPECT(!pst_pack_codes(&m, array(0), array(1), array(2), array(3), array(4), 0, (rows + 63) / 64, data.data),
               "packing of code %d", kind.code);
        for (int32_t i = 0; i < cols; i++) order.push_back(cols - 1 - i);
        m.data = data.data, m.bias = bias.data();
        if (ordered) m.order = order.data();
    }
};

void one_kind(Pair kind, int32_t cols) {
    Dice dice{uint32_t(kind.code * 7 + cols)};
    Codes first(kind, 70, cols, dice, false), second(kind, 5, cols, dice, true);
    const pst_matrix both[] = {first.m, second.m};
    TinyProgram p(MAX_ROWS, 1);
    const int32_t x = p.add(cols), y = p.add(75), apart = p.add(75);
    pst_matrix table = first.m;
    p.op(PST_EMBED, {}, x, {0, 0}, {1.0f}, {nullptr, &table});
    p.op(PST_LINEAR, {x}, y, {0, 0, 0, 2}, {0.0f, 1.0f}, {both});
    p.op(PST_LINEAR, {x}, p.part(apart, 0, 70), {0, 0, 0}, {0.0f, 1.0f}, {both});
    p.op(PST_LINEAR, {x}, p.part(apart, 70, 5), {0, 0, 0}, {0.0f, 1.0f}, {both + 1});
    const bool made = p.make(THREADS);
    EXPECT(made, "code %d: %s", kind.code, p.error.c_str());
    if (!made) return;
    Numbers expected;
    for (int threads : {1, THREADS}) {
        pst_pool* pool = pst_pool_new(threads, 5, 0);
        for (int32_t count : {MAX_ROWS, 1, 5}) {
            std::vector<int32_t> ids, positions;
            for (int32_t t = 0; t < count; t++) ids.push_back(t * 13 % 70), positions.push_back(t);
            const int32_t loc[] = {0, count}, rows[] = {0};
            pst_step step{count, 1, 0, 0, ids.data(), positions.data(), loc, rows, nullptr, nullptr, nullptr};
            EXPECT(p.run(pool, step) == 0, "it runs");
            const Numbers found = p.rows(y, count);
            EXPECT(same(found, p.rows(apart, count)), "code %d, act %d: segments are products", kind.code, kind.act);
            if (expected.empty()) expected = found;
            EXPECT(same(found, Numbers(expected.begin(), expected.begin() + count * 75)), "code %d, act %d, %d rows, %d threads",
                   kind.code, kind.act, count, threads);
        }
        pst_pool_free(pool);
    }
    for (float v : expected) EXPECT(std::isfinite(v), "code %d, act %d: every number was computed", kind.code, kind.act);
}

}  // namespace

void test_blocks() {
    struct Kind {
        int32_t code, group, scale, zero, offset;
    };
    constexpr Kind KINDS[] = {
        {PST_C_U8, 0, PST_S_F32, PST_Z_NONE, 128},    {PST_C_U8, 64, PST_S_BF16, PST_Z_U8, 0},
        {PST_C_U6, 16, PST_S_I8_F16, PST_Z_NONE, 32}, {PST_C_U5, 32, PST_S_U8_F16, PST_Z_U8_F16, 0},
        {PST_C_U4, 32, PST_S_F16, PST_Z_NONE, 8},     {PST_C_U4, 128, PST_S_F16, PST_Z_F16_CODES, 0},
        {PST_C_U4, 0, PST_S_E8M0, PST_Z_F16, 0},      {PST_C_U3, 16, PST_S_F16, PST_Z_NONE, 4},
        {PST_C_U3, 64, PST_S_BF16, PST_Z_BF16_CODES, 0},
        {PST_C_U2, 16, PST_S_U8_F16, PST_Z_U8_F16, 0}, {PST_C_U2, 256, PST_S_F16, PST_Z_NONE, 1},
        {PST_C_T4, 32, PST_S_E8M0, PST_Z_NONE, 0},    {PST_C_T4, 16, PST_S_E4M3, PST_Z_NONE, 0},
        {PST_C_F4, 64, PST_S_F32, PST_Z_NONE, 0},     {PST_C_E4M3, 128, PST_S_F32, PST_Z_NONE, 0},
        {PST_C_IQ3_S, 0, 0, 0, 0},                    {PST_C_IQ3_XXS, 0, 0, 0, 0},
        {PST_C_IQ2_S, 0, 0, 0, 0},                    {PST_C_IQ2_XS, 0, 0, 0, 0},
        {PST_C_IQ2_XXS, 0, 0, 0, 0},                  {PST_C_IQ1_S, 0, 0, 0, 0},
        {PST_C_IQ1_M, 0, 0, 0, 0},                    {PST_C_TQ1_0, 0, 0, 0, 0},
    };
    for (const Kind& k : KINDS)
        for (int32_t act : {PST_A_F32, PST_A_BF16, PST_A_I8}) {
            if (act == PST_A_I8 && (k.code == PST_C_F4 || k.code == PST_C_E4M3)) continue;
            const bool whole = k.code > PST_C_E4M3 || k.scale >= PST_S_U8_F16;
            one_kind({PST_M_BLOCK, act, k.code, k.group, k.scale, k.zero, k.offset}, whole ? 512 : 301);
        }
}
