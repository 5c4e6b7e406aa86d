// Products of rows of floats with panels of PST_M_BLOCK: weights alone are codes (docs/design/0014).
#include "block_rows.h"
#include "int_lanes.h"
#include "kernels.h"

namespace pst {

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 4, ROWS = 6;
#else
constexpr int VECTORS = 1, ROWS = 4;
#endif

// What a line of a chunk made ready is, INPUTS inputs of 16 outputs, and how rows of ITEM bytes meet it.
struct Floats {
    static constexpr int INPUTS = 1, ITEM = 4;
    using Weights = F;
    static F weights(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
    static void add(F& sum, F w, const uint8_t* x) { add_product(sum, w, all(*reinterpret_cast<const float*>(x))); }
};
// Pairs of bfloat16, rows of float32: the even input first.
struct Widened {
    static constexpr int INPUTS = 2, ITEM = 4;
    struct Weights {
        F even, odd;
    };
    static Weights weights(const uint8_t* p) {
        const I pairs = load_line(p);
        return {as_floats(shifted<16>(pairs)), as_floats(upper_halves(pairs))};
    }
    static void add(F& sum, const Weights& w, const uint8_t* x) {
        add_product(sum, w.even, all(reinterpret_cast<const float*>(x)[0]));
        add_product(sum, w.odd, all(reinterpret_cast<const float*>(x)[1]));
    }
};
#if defined(__AVX512BF16__)
struct Pairs {
    static constexpr int INPUTS = 2, ITEM = 2;
    using Weights = I;
    static I weights(const uint8_t* p) { return load_line(p); }
    static void add(F& sum, I w, const uint8_t* x) {
        int32_t two;
        std::memcpy(&two, x, 4);
        dot_bf16(sum, w, every(two));
    }
};
#endif

struct Part {
    const uint8_t* weights;  // [inputs / INPUTS][64]
    const float* scales;     // [groups][64]; null: one for all of a row
    const float* zeros;      // or null
    int64_t input;           // of the row, the first one
    int inputs, group;       // group 0: all
};

template <class X, int R, int C>
void add_part(const uint8_t* data, int64_t stride, const BlockRow& row, const Part& part, int output, float* tile) {
    const uint8_t* x[R];
    const float* totals[R];
    for (int r = 0; r < R; r++) {
        x[r] = data + r * stride + part.input * X::ITEM;
        totals[r] = reinterpret_cast<const float*>(data + r * stride + row.totals_at) + (part.group ? part.input / part.group : 0);
    }
    const uint8_t* w = part.weights + output * 4;
    int64_t at = 0;
    for (int input = 0, g = 0; input < part.inputs; g++) {
        F sum[R][C];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[r][c] = part.group ? all(0.0f) : load(tile + r * PANEL + output + c * LANES);
        const int last = part.group && input + part.group < part.inputs ? input + part.group : part.inputs;
        for (; input < last; input += X::INPUTS, w += 4 * PANEL, at += X::INPUTS * X::ITEM) {
            typename X::Weights line[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) line[c] = X::weights(w + c * 4 * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) X::add(sum[r][c], line[c], x[r] + at);
        }
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            const int64_t of = int64_t(g) * PANEL + output + c * LANES;
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                float* to = tile + r * PANEL + output + c * LANES;
                if (part.group) {
                    F total = fma(sum[r][c], load(part.scales + of), load(to));
                    if (part.zeros) total = fma(load(part.zeros + of), all(totals[r][g]), total);
                    store(to, total);
                } else store(to, sum[r][c]);
            }
        }
    }
}

template <class X, int R>
void add_rows(const uint8_t* data, int64_t stride, const BlockRow& row, const Part& part, float* tile) {
    for (int output = 0; output < PANEL; output += VECTORS * LANES)
        add_part<X, R, VECTORS>(data, stride, row, part, output, tile);
}

template <class X, int... R>
void choose(int count, const uint8_t* data, int64_t stride, const BlockRow& row, const Part& part, float* tile,
            std::integer_sequence<int, R...>) {
    using Add = void (*)(const uint8_t*, int64_t, const BlockRow&, const Part&, float*);
    static constexpr Add BY_ROWS[] = {add_rows<X, R + 1>...};
    BY_ROWS[count - 1](data, stride, row, part, tile);
}

template <class X>
void kernel(const Rows& rows, int first, int count, const Panel& panel, float* tile) {
    const BlockShape& shape = *panel.block;
    const BlockRow row(shape.cols, shape.group, X::ITEM);
    constexpr int LONGEST = CHUNK * PANEL * (X::INPUTS == 1 ? 4 : 2);
    alignas(64) uint8_t ready[LONGEST];
    alignas(64) float scales[MOST_GROUPS * PANEL], zeros[MOST_GROUPS * PANEL];
    std::memset(tile, 0, size_t(count) * PANEL * 4);
    const bool some_zeros = shape.zero != PST_Z_NONE;
    for (int64_t c = 0; c < shape.chunks(); c++) {
        if (shape.group) block_scales(shape, panel.data, c, 0, scales, zeros);
        // Half a chunk lies well in the first cache; groups stay whole.
        const int units = shape.units_of(c), step = shape.group == CHUNK ? UNITS : UNITS / 2;
        for (int u = 0; u < units; u += step) {
            const int some = std::min(step, units - u);
            if constexpr (X::INPUTS == 1) widen_floats(shape, panel.data, c, u, some, reinterpret_cast<float*>(ready));
            else widen_pairs(shape, panel.data, c, u, some, ready);
            const int64_t group = shape.group ? u * UNIT / shape.group * PANEL : 0;
            const Part part{ready, scales + group, some_zeros ? zeros + group : nullptr, c * CHUNK + u * UNIT, some * UNIT, shape.group};
            for (int r = 0; r < count; r += ROWS)
                choose<X>(std::min(ROWS, count - r), rows.data + (first + r) * rows.stride, rows.stride, row, part,
                          tile + r * PANEL, std::make_integer_sequence<int, ROWS>());
        }
    }
    if (shape.group) return;
    block_scales(shape, panel.data, 0, 0, scales, zeros);
    for (int r = 0; r < count; r++) {
        const F total = all(*reinterpret_cast<const float*>(rows.data + (first + r) * rows.stride + row.totals_at));
        for (int j = 0; j < PANEL; j += LANES) {
            F y = load(tile + r * PANEL + j) * load(scales + j);
            if (some_zeros) y = fma(load(zeros + j), total, y);
            store(tile + r * PANEL + j, y);
        }
    }
}

int64_t row_bytes_s8(int cols, int group) { return BlockRow(cols, group, 1).bytes; }
int64_t row_bytes_f32(int cols, int group) { return BlockRow(cols, group, 4).bytes; }

}  // namespace

void block_kernel_s8(const Rows& rows, int first, int count, const Panel& panel, float* tile);

namespace {

template <void (*PREPARE)(const float*, int, int, uint8_t*)>
void prepare(const float* x, int cols, int group, uint8_t* data, float*, int32_t*) {
    PREPARE(x, cols, group, data);
}
int32_t no_groups(int, int) { return 0; }

constexpr Product S8{PST_M_BLOCK, PST_A_I8, MAX_TILE_ROWS, row_bytes_s8, no_groups, prepare<prepare_blocks_s8>,
                     block_kernel_s8, nullptr, nullptr, nullptr, 0};
constexpr Product F32{PST_M_BLOCK, PST_A_F32, MAX_TILE_ROWS, row_bytes_f32, no_groups, prepare<prepare_blocks_f32>,
                      kernel<Widened>, nullptr, nullptr, nullptr, 0};
constexpr Product F32_FLOATS{PST_M_BLOCK, PST_A_F32, MAX_TILE_ROWS, row_bytes_f32, no_groups, prepare<prepare_blocks_f32>,
                             kernel<Floats>, nullptr, nullptr, nullptr, 0};
constexpr Product ROUNDED_FLOATS{PST_M_BLOCK, PST_A_BF16, MAX_TILE_ROWS, row_bytes_f32, no_groups,
                                 prepare<prepare_blocks_rounded>, kernel<Floats>, nullptr, nullptr, nullptr, 0};
#if defined(__AVX512BF16__)
int64_t row_bytes_bf16(int cols, int group) { return BlockRow(cols, group, 2).bytes; }
constexpr Product BF16{PST_M_BLOCK, PST_A_BF16, MAX_TILE_ROWS, row_bytes_bf16, no_groups, prepare<prepare_blocks_bf16>,
                       kernel<Pairs>, nullptr, nullptr, nullptr, 0};
#else
constexpr Product BF16{PST_M_BLOCK, PST_A_BF16, MAX_TILE_ROWS, row_bytes_f32, no_groups, prepare<prepare_blocks_rounded>,
                       kernel<Widened>, nullptr, nullptr, nullptr, 0};
#endif

}  // namespace

const Product* block_product(int32_t format, int32_t act, int32_t code) {
    if (format != PST_M_BLOCK) return nullptr;
    if (act == PST_A_I8) return has_integer_rows(code) ? &S8 : nullptr;
    // A table of floats is exact in float32 alone.
    if (code == PST_C_F4) return act == PST_A_F32 ? &F32_FLOATS : act == PST_A_BF16 ? &ROUNDED_FLOATS : nullptr;
    return act == PST_A_F32 ? &F32 : act == PST_A_BF16 ? &BF16 : nullptr;
}

}  // namespace pst
