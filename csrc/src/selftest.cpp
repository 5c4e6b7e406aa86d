// What a library has to get right before it is used: every product, a norm, every activation, attention over two pages,
// against the same in double precision. Wrong results of a miscompiled or misdetected instruction set look like a bad
// model; here they have a name. A few milliseconds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "block_rows.h"
#include "selftest.h"
#include "simd.h"

namespace pst {

namespace {

const char* const ACTS[] = {"float32", "bfloat16", "8-bit"};

// A kind of matrix: a format of floats, or codes and what they share.
struct Stored {
    const char* name;
    int32_t format, code, group, scale, zero, offset;
};
constexpr Stored STORED[] = {
    {"float32", PST_M_F32, 0, 0, 0, 0, 0},
    {"float16", PST_M_F16, 0, 0, 0, 0, 0},
    {"bfloat16", PST_M_BF16, 0, 0, 0, 0, 0},
    {"8-bit", PST_M_BLOCK, PST_C_U8, 0, PST_S_F32, PST_Z_NONE, 128},
    {"8-bit with zeros", PST_M_BLOCK, PST_C_U8, 64, PST_S_BF16, PST_Z_U8, 0},
    {"6-bit", PST_M_BLOCK, PST_C_U6, 16, PST_S_I8_F16, PST_Z_NONE, 32},
    {"5-bit", PST_M_BLOCK, PST_C_U5, 32, PST_S_U8_F16, PST_Z_U8_F16, 0},
    {"4-bit", PST_M_BLOCK, PST_C_U4, 32, PST_S_F16, PST_Z_NONE, 8},
    {"4-bit with zeros", PST_M_BLOCK, PST_C_U4, 128, PST_S_F16, PST_Z_F16_CODES, 0},
    {"3-bit", PST_M_BLOCK, PST_C_U3, 16, PST_S_F16, PST_Z_F16, 0},
    {"2-bit", PST_M_BLOCK, PST_C_U2, 16, PST_S_U8_F16, PST_Z_U8_F16, 0},
    {"table", PST_M_BLOCK, PST_C_T4, 32, PST_S_E8M0, PST_Z_NONE, 0},
    {"small table", PST_M_BLOCK, PST_C_T4, 16, PST_S_E4M3, PST_Z_NONE, 0},
    {"table of floats", PST_M_BLOCK, PST_C_F4, 64, PST_S_F32, PST_Z_NONE, 0},
    {"e4m3", PST_M_BLOCK, PST_C_E4M3, 128, PST_S_F32, PST_Z_NONE, 0},
    {"IQ3_S", PST_M_BLOCK, PST_C_IQ3_S, 0, 0, 0, 0},
    {"IQ3_XXS", PST_M_BLOCK, PST_C_IQ3_XXS, 0, 0, 0, 0},
    {"IQ2_S", PST_M_BLOCK, PST_C_IQ2_S, 0, 0, 0, 0},
    {"IQ2_XS", PST_M_BLOCK, PST_C_IQ2_XS, 0, 0, 0, 0},
    {"IQ2_XXS", PST_M_BLOCK, PST_C_IQ2_XXS, 0, 0, 0, 0},
    {"IQ1_S", PST_M_BLOCK, PST_C_IQ1_S, 0, 0, 0, 0},
    {"IQ1_M", PST_M_BLOCK, PST_C_IQ1_M, 0, 0, 0, 0},
    {"TQ1_0", PST_M_BLOCK, PST_C_TQ1_0, 0, 0, 0, 0},
};
constexpr float TABLE[] = {-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127};

// 64 outputs times three rows.
struct ProductTest {
    static constexpr int ROWS = 3;
    const Stored& stored;
    pst_matrix m{};
    const int cols;
    const std::string name;
    Dice dice{12345};
    BlockShape shape;
    const Product* product;
    Numbers values, x;
    Bytes data, tile{ROWS * PANEL * 4}, other{ROWS * PANEL * 4};

    // Not a multiple of anything, where a format may have so few.
    static int width(const Stored& s) { return s.code > PST_C_E4M3 || s.scale >= PST_S_U8_F16 ? 256 : 100; }
    static pst_matrix matrix_of(const Stored& s, int32_t act) {
        pst_matrix made{};
        made.format = s.format, made.act = act, made.rows = PANEL, made.cols = width(s), made.group = s.group;
        made.code = s.code, made.scale = s.scale, made.zero = s.zero, made.offset = s.offset, made.factor = 0.5f;
        if (s.format == PST_M_BLOCK && (s.code == PST_C_T4 || s.code == PST_C_F4)) made.table = TABLE;
        return made;
    }

    ProductTest(const Stored& stored, int32_t act)
        : stored(stored), m(matrix_of(stored, act)), cols(m.cols),
          name(std::string("product of ") + stored.name + " weights and " + ACTS[act] + " rows"),
          product(find_product(m.format, act, m.code)), values(size_t(PANEL * cols)), x(size_t(ROWS * cols)),
          data(pst_panel_bytes(&m)) {
        m.data = data.data;
        // Whole numbers up to 127 of which one of each 32 is reached: bfloat16 and 8 bits hold them without loss.
        for (int i = 0; i < ROWS * cols; i++) x[size_t(i)] = float(i % cols % 32 ? dice.whole(-127, 127) : 127) / 64;
    }

    std::string packing() {
        return m.format == PST_M_BLOCK ? codes() : numbers();
    }
    std::string numbers() {
        const Numbers weights = dice.reals(size_t(PANEL * cols));
        const void* row_of[PANEL];
        for (int j = 0; j < PANEL; j++) row_of[j] = weights.data() + j * cols;
        if (pst_pack(&m, PST_F32, row_of, 0, 1, data.data)) return name + ": packing";
        if (pst_unpack(&m, 0, values.data())) return name + ": unpacking";
        std::string fault;
        for (size_t i = 0; i < values.size() && fault.empty(); i++) {
            const double size = std::fabs(weights[i]);  // half a last place is lost, or nothing
            const double loss = m.format == PST_M_F32 ? 0 : m.format == PST_M_F16 ? size / 2048 + 1e-7 : size / 256;
            fault = off(name + ": packed weight", values[i], weights[i], loss);
        }
        return fault;
    }
    // Bytes at random that are no NaN in any type: what they stand for is the packed values' business to agree on.
    std::string codes() {
        constexpr int BITS[] = {8, 6, 5, 4, 3, 2, 4, 4, 7};
        std::vector<uint8_t> bytes[5];  // codes, scales, supers, zeros, their supers
        const void* of[5][PANEL];
        for (int part = 0; part < 5; part++) {
            bytes[part].resize(size_t(PANEL * cols));
            for (int j = 0; j < PANEL; j++) of[part][j] = bytes[part].data() + j * cols;
        }
        for (uint8_t& byte : bytes[0])
            byte = uint8_t(dice.whole(0, m.code > PST_C_E4M3 ? 0x2f : (1 << BITS[m.code]) - 1 - (m.code == PST_C_E4M3)));
        for (size_t i = 0; i < bytes[1].size(); i++) {
            bytes[1][i] = uint8_t(m.scale <= PST_S_BF16 ? (i % 2 ? 0x3c : dice.whole(0, 255)) : dice.whole(1, 15));
            bytes[3][i] = uint8_t(m.zero == PST_Z_U8 || m.zero == PST_Z_U8_F16 ? dice.whole(0, 15) : (i % 2 ? 0x38 : 0));
            bytes[2][i] = bytes[4][i] = i % 2 ? 0x2c : 0;  // halves of 1/16
        }
        if (m.scale == PST_S_F32)
            for (size_t i = 0; i + 4 <= bytes[1].size(); i += 4) {
                const float scale = dice.real();
                std::memcpy(&bytes[1][i], &scale, 4);
            }
        const bool supers = m.scale >= PST_S_U8_F16, blocks = m.code > PST_C_E4M3;
        if (pst_pack_codes(&m, of[0], blocks ? nullptr : of[1], supers ? of[2] : nullptr, m.zero ? of[3] : nullptr,
                           m.zero == PST_Z_U8_F16 ? of[4] : nullptr, 0, 1, data.data))
            return name + ": packing";
        return pst_unpack(&m, 0, values.data()) ? name + ": unpacking" : "";
    }

    std::string products() {
        if (!product) return "no " + name;
        const bool block = block_shape(m, shape);
        const int group = block ? group_of_rows(cols, shape.group, m.act) : 0;
        const int64_t bytes = product->row_bytes(cols, group);
        Bytes rows(bytes * ROWS);
        for (int i = 0; i < ROWS; i++) product->prepare(x.data() + i * cols, cols, group, rows.data + i * bytes);
        const Rows ready{rows.data, bytes, ROWS};
        const Panel panel{data.data, cols, block ? &shape : nullptr};
        for (int i = 0; i < ROWS; i++) product->kernel(ready, i, 1, panel, tile.floats() + i * PANEL);
        std::string fault = check_tile();
        if (fault.empty() && product->tile_rows >= ROWS) {
            product->kernel(ready, 0, ROWS, panel, other.floats());
            fault = same("a row among others");
        }
        if (fault.empty() && block) {
            constexpr int MANY = 9;  // codes are made ready then
            Bytes many(bytes * MANY), out(MANY * PANEL * 4);
            for (int i = 0; i < MANY; i++) std::memcpy(many.data + i * bytes, rows.data + i % ROWS * bytes, size_t(bytes));
            product->kernel({many.data, bytes, MANY}, 0, MANY, panel, out.floats());
            std::memcpy(other.data, out.data + (MANY - ROWS) * PANEL * 4, ROWS * PANEL * 4);
            fault = same("a row among many");
        }
        if (fault.empty() && product->many) {
            Bytes scratch(product->unpacked_bytes(cols));
            product->unpack(panel, scratch.data);
            product->many(ready, 0, ROWS, {scratch.data, cols}, other.floats());
            fault = same("a row among many");
        }
        return fault;
    }

    std::string check_tile() {
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < PANEL; j++) {
                double expected = 0, size = 0;
                for (int k = 0; k < cols; k++) {
                    double part = double(x[size_t(i * cols + k)]) * double(values[size_t(j * cols + k)]);
                    expected += part;
                    size += std::fabs(part);
                }
                // What zeros take away is added and taken by itself: sums are larger than their parts.
                const double bound = size * cols * (m.zero ? 1e-6 : 6e-8) + 1e-9;
                std::string fault = off(name, tile.floats()[i * PANEL + j], expected, bound);
                if (!fault.empty()) return fault;
            }
        return "";
    }
    std::string same(const char* what) {
        bool equal = !std::memcmp(tile.data, other.data, ROWS * PANEL * sizeof(float));
        return equal ? "" : name + ": " + what + " is not bit for bit what it is alone";
    }
};

std::string products_fault() {
    for (const Stored& stored : STORED)
        for (int32_t act : {PST_A_F32, PST_A_BF16, PST_A_I8}) {
            const bool block = stored.format == PST_M_BLOCK;
            if (!block && (act == PST_A_I8 || (act == PST_A_BF16 && stored.format != PST_M_BF16))) continue;
            if (block && act == PST_A_I8 && !has_integer_rows(stored.code)) continue;
            ProductTest test(stored, act);
            std::string fault = test.packing();
            if (fault.empty()) fault = test.products();
            if (!fault.empty()) return fault;
        }
    return "";
}

constexpr double POSITIVE = 0.75, NEGATIVE = 1.5;

double activated(int a, double x) {
    switch (a) {
        case PST_SILU: return x * sigmoid(x);
        case PST_GELU: return 0.5 * x * (1 + std::erf(x * std::sqrt(0.5)));
        case PST_GELU_TANH: return 0.5 * x * (1 + std::tanh(std::sqrt(8 / M_PI) / 2 * (x + 0.044715 * x * x * x)));
        case PST_RELU: return std::max(x, 0.0);
        case PST_RELU2: return std::max(x, 0.0) * std::max(x, 0.0);
        case PST_SIGMOID: return sigmoid(x);
        case PST_TANH: return std::tanh(x);
        case PST_QUICK_GELU: return x * sigmoid(1.702 * x);
        default: return (x > 0 ? POSITIVE * x * x : NEGATIVE * (std::expm1(std::min(x, -1e-6)) - x)) + x / 2;  // PST_XIELU
    }
}

std::string activations_fault() {
    constexpr int N = 101;
    constexpr float LIMIT = 7;
    const char* names[] = {"silu",    "gelu", "gelu_tanh",      "relu",      "relu2",
                           "sigmoid", "tanh", "swiglu_clamped", "quick_gelu", "xielu", "silu_clamped"};
    for (int a = PST_SILU; a <= PST_SILU_CLAMPED; a++) {
        bool clamped = a == PST_SWIGLU_CLAMPED || a == PST_SILU_CLAMPED;
        Tiny tiny(1);
        Numbers x(N), up(N);
        for (int i = 0; i < N; i++) x[size_t(i)] = float(i - N / 2) * 0.25f, up[size_t(i)] = float(N / 3 - i) * 0.25f;
        int32_t in = tiny.add(x), other = tiny.add(up), out = tiny.add(Numbers(N));
        pst_op& op = tiny.op(clamped ? PST_GATED : PST_ACT, in, other, out);
        op.n[0] = a;
        op.f[0] = clamped ? LIMIT : float(POSITIVE), op.f[1] = float(NEGATIVE);
        std::string name = std::string("activation ") + names[a], fault = tiny.run(name);
        for (size_t i = 0; i < N && fault.empty(); i++) {
            double gate = x[i], expected = activated(a, gate);
            if (clamped) {
                gate = std::min<double>(gate, LIMIT);
                const double other_half = std::clamp<double>(up[i], -LIMIT, LIMIT);
                expected = a == PST_SILU_CLAMPED ? gate * sigmoid(gate) * other_half
                                                 : gate * sigmoid(1.702 * gate) * (other_half + 1);
            }
            fault = off(name, tiny.buffers[size_t(out)][i], expected, 2e-6 * (1 + std::fabs(expected)));
        }
        if (!fault.empty()) return fault;
    }
    return "";
}

std::string norm_fault() {
    constexpr int N = 101;
    Dice dice{7};
    Tiny tiny(1);
    Numbers x = dice.reals(N), w = dice.reals(N);
    int32_t in = tiny.add(x), out = tiny.add(Numbers(N));
    pst_op& op = tiny.op(PST_NORM, in, -1, out);
    op.n[0] = N, op.n[1] = 1, op.f[0] = 1e-5f, op.p[0] = w.data();
    std::string fault = tiny.run("norm");
    double squares = 0;
    for (float v : x) squares += double(v) * double(v);
    for (size_t i = 0; i < N && fault.empty(); i++)
        fault = off("norm", tiny.buffers[size_t(out)][i], x[i] / std::sqrt(squares / N + 1e-5) * w[i], 1e-5);
    return fault;
}

std::string biased_fault() {
    constexpr int HEADS = 3, D = 5;
    Dice dice{9};
    Tiny tiny(1);
    Numbers x = dice.reals(HEADS * D), dt = dice.reals(HEADS), a = dice.reals(HEADS);
    int32_t in = tiny.add(x), by = tiny.add(dt), out = tiny.add(Numbers(HEADS * (D + 4)));
    pst_op& op = tiny.op(PST_BIASED_HEADS, in, by, out);
    op.n[0] = HEADS, op.f[0] = 2.0f, op.p[0] = a.data();
    std::string fault = tiny.run("biased heads");
    for (size_t i = 0; i < HEADS * (D + 4) && fault.empty(); i++) {
        size_t head = i / (D + 4), column = i % (D + 4);
        double bias = 2 * std::exp(double(a[head]) * std::log1p(std::exp(double(dt[head]))));
        double expected = column < D ? double(x[head * D + column]) : column == D ? bias : 0;
        fault = off("biased heads", tiny.buffers[size_t(out)][i], expected, 1e-5);
    }
    return fault;
}

// Three heads of two rows, each times its matrix; two numbers behind each pass.
std::string heads_fault() {
    constexpr int ROWS = 2, HEADS = 3, K = 33, N = 70, REST = 2, FILLED = 2 * PANEL;
    Dice dice{31};
    Numbers w = dice.reals(size_t(HEADS * N * K)), x = dice.reals(size_t(ROWS * HEADS * (K + REST)));
    pst_matrix m{};
    m.rows = HEADS * FILLED, m.cols = K;
    Bytes data(HEADS * FILLED / PANEL * pst_panel_bytes(&m));
    const void* row_of[HEADS * FILLED];
    for (int i = 0; i < HEADS * FILLED; i++)
        row_of[i] = i % FILLED < N ? w.data() + (i / FILLED * N + i % FILLED) * K : nullptr;
    if (pst_pack(&m, PST_F32, row_of, 0, HEADS * FILLED / PANEL, data.data)) return "products of heads: packing";
    m.data = data.data;
    Tiny tiny(ROWS);
    int32_t in = tiny.add(x), out = tiny.add(Numbers(ROWS * HEADS * (N + REST)));
    pst_op& op = tiny.op(PST_LATENT, in, -1, out);
    op.n[0] = HEADS, op.n[1] = N, op.n[3] = REST, op.p[0] = &m;
    std::string fault = tiny.run("products of heads");
    for (int i = 0; i < ROWS * HEADS * (N + REST) && fault.empty(); i++) {
        const int n = i % (N + REST), at = i / (N + REST) * (K + REST);
        double expected = n < N ? 0 : double(x[size_t(at + K + n - N)]);
        for (int k = 0; n < N && k < K; k++)
            expected += double(x[size_t(at + k)]) * double(w[size_t((i / (N + REST) % HEADS * N + n) * K + k)]);
        fault = off("products of heads", tiny.buffers[size_t(out)][size_t(i)], expected, 1e-5);
    }
    return fault;
}

// 20 tokens of one sequence, written to two pages of 16 and attended to, causally: 2 query heads share one of keys. Or
// the last numbers of keys have a plane of their own, and the first ones are the values.
struct AttentionTest {
    static constexpr int T = 20, S = 16, HEADS = 2, D = 32;
    Dice dice{99};
    Numbers q = dice.reals(T * HEADS * D), k = dice.reals(T * D), v = dice.reals(T * D);

    int width = D;  // of a value

    std::string fault(int32_t dtype, const std::string& name, double bound, int behind = 0) {
        Tiny tiny(T);
        width = D - behind;
        Bytes keys(2 * S * D * 4), values(2 * S * D * 4);
        const int second = behind ? behind : D;
        tiny.planes.push_back({keys.data, dtype, 1, width, 0, S * width, width, width});
        tiny.planes.push_back({values.data, dtype, 1, second, 0, S * second, second, second});
        int32_t rq = tiny.add(q), rk = tiny.add(behind ? columns(k, 0, width) : k);
        int32_t rv = tiny.add(behind ? columns(k, width, D) : v), out = tiny.add(Numbers(size_t(T * HEADS * width)));
        const int32_t write[] = {0, 0, 1, width, 1, second, 0, 1};
        const int32_t attend[] = {0, 0, HEADS, 1, D, width, 0, !behind, 0, 0, 1, behind};
        std::copy(std::begin(write), std::end(write), tiny.op(PST_WRITE, rk, rv, -1).n);
        pst_op& op = tiny.op(PST_ATTEND, rq, -1, out);
        std::copy(std::begin(attend), std::end(attend), op.n);
        op.f[0] = SCALE;
        int32_t table[] = {1, 0}, shared = 1, blocks = 2;
        const int32_t* tables[] = {table};
        pst_group group{1, S, tables, &shared, &blocks, nullptr};
        std::string fault = tiny.run(name, &group);
        for (int i = 0; i < T * HEADS * width && fault.empty(); i++)
            fault = off(name, tiny.buffers[size_t(out)][size_t(i)],
                        expected(i / (HEADS * width), i / width % HEADS, i % width, behind ? k : v), bound);
        return fault;
    }
    // Numbers first ... last-1 of every token's.
    static Numbers columns(const Numbers& x, int first, int last) {
        Numbers out;
        for (int t = 0; t < T; t++) out.insert(out.end(), x.begin() + t * D + first, x.begin() + t * D + last);
        return out;
    }
    double expected(int t, int head, int component, const Numbers& value) const {
        double total = 0, out = 0;
        for (int s = 0; s <= t; s++) {
            double dot = 0;
            for (int d = 0; d < D; d++)
                dot += double(q[size_t((t * HEADS + head) * D + d)]) * double(k[size_t(s * D + d)]);
            double weight = std::exp(dot * SCALE);
            total += weight;
            out += weight * double(value[size_t(s * D + component)]);
        }
        return out / total;
    }
    static constexpr float SCALE = 0.25f;
};

std::string attention_fault() {
    AttentionTest test;
    std::string fault = test.fault(PST_F32, "attention over a float32 cache", 1e-5);
    if (fault.empty()) fault = test.fault(PST_F16, "attention over a float16 cache", 3e-3);
    if (fault.empty()) fault = test.fault(PST_BF16, "attention over a bfloat16 cache", 2e-2);
    if (fault.empty()) fault = test.fault(PST_F32, "latent attention over a float32 cache", 1e-5, 7);
    return fault.empty() ? test.fault(PST_BF16, "latent attention over a bfloat16 cache", 2e-2, 7) : fault;
}

std::string exp_fault() {
    for (float x = -87.0f; x < 88.7f; x += 0.8125f) {
        float in[LANES], out[LANES];
        for (int i = 0; i < LANES; i++) in[i] = std::min(x + float(i) * 0.0507f, 88.7f);
        store(out, exp(load(in)));
        for (int i = 0; i < LANES; i++) {
            double expected = std::exp(double(in[i]));
            std::string fault = off("exp", out[i], expected, expected * 4e-7);
            if (!fault.empty()) return fault;
        }
    }
    return "";
}

}  // namespace

}  // namespace pst

extern "C" int32_t pst_self_test(char* message, int32_t size) {
    std::string fault;
    try {
        for (auto test : {pst::exp_fault, pst::products_fault, pst::activations_fault, pst::norm_fault,
                          pst::biased_fault, pst::heads_fault, pst::attention_fault, pst::choose_fault,
                          pst::experts_fault, pst::states_fault, pst::streams_fault, pst::entries_fault,
                          pst::text_fault, pst::adapters_fault})
            if (fault.empty()) fault = test();
    } catch (const std::exception& problem) {
        fault = problem.what();
    }
    if (message && size > 0) std::snprintf(message, size_t(size), "%s", fault.c_str());
    return fault.empty() ? 0 : 1;
}
