// Products of rows of floats with panels of PST_M_BLOCK: weights alone are codes (docs/design/0014).
#include "block_floats.h"
#include "block_rows.h"
#include "kernels.h"

namespace pst {

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 6;
#else
constexpr int ROWS = 4;
#endif
// Vectors of outputs that so many rows meet at a time.
constexpr int vectors_of([[maybe_unused]] int rows) {
#if defined(__AVX512F__)
    return 4;
#elif defined(__AVX2__)
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;  // a vector is two registers of 16
#elif defined(__aarch64__)
    return rows == 1 ? 2 : 1;  // four of 32, and both halves of a line take eight
#else
    return 1;
#endif
}

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
    using Weights = TwoFloats;
    template <int L, int P, class Source> static Weights of(const Source& source, const uint8_t* unit) {
        return source.template floats<L, P>(unit);
    }
    static Weights weights(const uint8_t* p) {
        const I pairs = load_line(p);
        return {as_floats(shifted<16>(pairs)), as_floats(bits32<0xffff0000u>(pairs))};
    }
    static void add(F& sum, const Weights& w, const uint8_t* x) {
        add_product(sum, w.even, all(reinterpret_cast<const float*>(x)[0]));
        add_product(sum, w.odd, all(reinterpret_cast<const float*>(x)[1]));
    }
};
#if defined(PST_BF16_PAIRS)
struct Pairs {
    static constexpr int INPUTS = 2, ITEM = 2;
    using Weights = I;
    template <int L, int P, class Source> static Weights of(const Source& source, const uint8_t* unit) {
        return source.template pairs<L, P>(unit);
    }
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

// ---- few rows: codes are turned in registers

template <class Source, class X, int L, int R, int C>
inline __attribute__((always_inline)) void add_line(F (&sum)[R][C], const Source& source, const uint8_t* unit,
                                                    const uint8_t* const (&x)[R], int64_t at) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const auto first = X::template of<L, 0>(source, unit + c * LINE);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) X::add(sum[r][c], first, x[r] + at + 4 * L * X::ITEM);
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        const auto second = X::template of<L, 1>(source, unit + c * LINE);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) X::add(sum[r][c], second, x[r] + at + (4 * L + 2) * X::ITEM);
    }
}

template <class X, int R, int C>
struct Sums {
    F sum[R][C];
    const float* totals[R];
    const Part& part;
    int output;
    float* tile;

    float* at(int r, int c) const { return tile + r * PANEL + output + c * LANES; }
    void begin() {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[r][c] = part.group ? all(0.0f) : load(at(r, c));
    }
    void finish(int64_t g) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            const int64_t of = g * PANEL + output + c * LANES;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                F total = sum[r][c];
                if (part.group) {
                    total = fma(total, load(part.scales + of), load(at(r, c)));
                    if (part.zeros) total = fma(load(part.zeros + of), all(totals[r][g]), total);
                }
                store(at(r, c), total);
            }
        }
    }
};

// As `add_part`, of codes as they lie.
template <class Source, class X, bool HALVES, int R, int C, int... L>
void few_part(const Source& source, const uint8_t* data, int64_t stride, const BlockRow& row, const Part& part, int output,
              float* tile, std::integer_sequence<int, L...>) {
    Sums<X, R, C> sums{{}, {}, part, output, tile};
    const uint8_t* x[R];
    for (int r = 0; r < R; r++) {
        x[r] = data + r * stride + part.input * X::ITEM;
        sums.totals[r] = reinterpret_cast<const float*>(data + r * stride + row.totals_at) + (part.group ? part.input / part.group : 0);
    }
    const uint8_t* unit = part.weights + output * 4;
    const int units = part.inputs / UNIT, length = HALVES || !part.group ? units : part.group / UNIT;
    int64_t at = 0, g = 0;
    for (int u = 0; u < units; u++, unit += Source::BYTES, at += UNIT * X::ITEM) {
        for (int i = 0; i < Source::BYTES * C / PANEL_LINE; i++)
            __builtin_prefetch(unit + STREAM_AHEAD + i / C * PANEL_LINE + i % C * LINE);
        if (HALVES || u % length == 0) sums.begin();
        (add_line<Source, X, L>(sums.sum, source, unit, x, at), ...);
        if (HALVES) sums.finish(g++), sums.begin();
        (add_line<Source, X, L + 4>(sums.sum, source, unit, x, at), ...);
        if (HALVES || u % length == length - 1 || u == units - 1) sums.finish(g++);
    }
}

template <class Source, class X, bool HALVES, int R>
void few_rows(const BlockShape& shape, const uint8_t* data, int64_t stride, const BlockRow& row, const Part& part, float* tile) {
    const Source source(shape);
    constexpr int C = vectors_of(R);
    for (int output = 0; output < PANEL; output += C * LANES)
        few_part<Source, X, HALVES, R, C>(source, data, stride, row, part, output, tile, std::make_integer_sequence<int, 4>());
}

using Few = void (*)(const BlockShape&, const uint8_t*, int64_t, const BlockRow&, const Part&, float*);
constexpr int FEW_ROWS = 4;
template <class Source, class X, bool HALVES>
constexpr Few BY_ROWS[FEW_ROWS] = {few_rows<Source, X, HALVES, 1>, few_rows<Source, X, HALVES, 2>,
                                   few_rows<Source, X, HALVES, 3>, few_rows<Source, X, HALVES, 4>};

// Null where codes are made ready even for few rows.
template <class X>
const Few* find_few([[maybe_unused]] const BlockShape& s) {
#if defined(PST_VECTORS)
    if constexpr (X::INPUTS == 2) {
#if defined(__AVX512F__)
        if (s.code == PST_C_U4 || s.code == PST_C_T4)
            return s.group == 16 ? BY_ROWS<Nibbles, X, true> : BY_ROWS<Nibbles, X, false>;
#else
        if (s.code == PST_C_U4 && s.group != 16) return BY_ROWS<Whole<Code4>, X, false>;
#endif
        if (s.group == 16) return nullptr;
        if (s.code == PST_C_U8) return BY_ROWS<Whole<Code8>, X, false>;
        if (s.code == PST_C_E4M3) return BY_ROWS<SmallFloats, X, false>;
    } else if (s.group != 16) return BY_ROWS<TableFloats, Widened, false>;
#endif
    return nullptr;
}

// ---- many

template <class X, int R>
void add_rows(const uint8_t* data, int64_t stride, const BlockRow& row, const Part& part, float* tile) {
    constexpr int C = vectors_of(R);
    for (int output = 0; output < PANEL; output += C * LANES)
        add_part<X, R, C>(data, stride, row, part, output, tile);
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
    const Few* few = count <= FEW_ROWS ? find_few<X>(shape) : nullptr;
    for (int64_t c = 0; c < shape.chunks(); c++) {
        if (shape.group) block_scales(shape, panel.data, c, few ? STREAM_AHEAD : 0, scales, zeros);
        if (few) {
            const Part part{codes_at(shape, panel.data, c), scales, some_zeros ? zeros : nullptr, c * CHUNK,
                            shape.units_of(c) * UNIT, shape.group};
            few[count - 1](shape, rows.data + first * rows.stride, rows.stride, row, part, tile);
            continue;
        }
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

constexpr Product S8{PST_M_BLOCK, PST_A_I8, MAX_TILE_ROWS, row_bytes_s8, prepare_blocks_s8,
                     block_kernel_s8, nullptr, nullptr, nullptr, 0};
constexpr Product F32{PST_M_BLOCK, PST_A_F32, MAX_TILE_ROWS, row_bytes_f32, prepare_blocks_f32,
                      kernel<Widened>, nullptr, nullptr, nullptr, 0};
constexpr Product F32_FLOATS{PST_M_BLOCK, PST_A_F32, MAX_TILE_ROWS, row_bytes_f32, prepare_blocks_f32,
                             kernel<Floats>, nullptr, nullptr, nullptr, 0};
constexpr Product ROUNDED_FLOATS{PST_M_BLOCK, PST_A_BF16, MAX_TILE_ROWS, row_bytes_f32, 
                                 prepare_blocks_rounded, kernel<Floats>, nullptr, nullptr, nullptr, 0};
#if defined(PST_BF16_PAIRS)
int64_t row_bytes_bf16(int cols, int group) { return BlockRow(cols, group, 2).bytes; }
constexpr Product BF16{PST_M_BLOCK, PST_A_BF16, MAX_TILE_ROWS, row_bytes_bf16, prepare_blocks_bf16,
                       kernel<Pairs>, nullptr, nullptr, nullptr, 0};
#else
constexpr Product BF16{PST_M_BLOCK, PST_A_BF16, MAX_TILE_ROWS, row_bytes_f32, prepare_blocks_rounded,
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
