// PST_LINEAR: norm, product, bias, activation and residual of a step's rows in one operation.
#include <algorithm>
#include <cmath>

#include "epilogue.h"
#include "kernels.h"
#include "norm_row.h"
#include "ops.h"

namespace pst {

namespace {

// Up to so many numbers every thread prepares all rows for itself: that takes less than waiting for each other.
constexpr int64_t FEW_NUMBERS = 8192;
// Few rows wait for memory: a claim is long enough for the prefetchers, short enough to share fairly.
constexpr int64_t CLAIM_BYTES = 96 * 1024;
// Claims per thread below which one slow thread delays all.
constexpr int64_t CLAIMS = 4;
// The same where rows are many, and a claim takes milliseconds: the other thread is then seldom late by a whole one.
constexpr int64_t LONG_CLAIMS = 16;
// Rows for which a panel is fetched at least, where there are as many.
constexpr int64_t BLOCK_ROWS = 96;
// Of its first panel a thread fetches so much ahead of the barrier: the prefetch of a kernel's loop begins behind it.
constexpr int64_t WARM_BYTES = 4096;
// So many rows a kernel takes at once: they fetch a panel, those behind them find it near.
constexpr int FIRST_ROWS = 6;
// Blocks of rows are multiples of this: no kernel's last group is then smaller than others.
constexpr int64_t ROW_STEP = 12;

// Products of two bytes, 127 * 127 at most, that a 32-bit sum has room for (132,000 and some; sums of rows are exact as far).
constexpr int32_t MOST_BYTES_ADDED = 131072;

int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

struct Prepared {
    uint8_t* data;
    float* scale;
    int32_t* sums;
};

// How the work is cut: units are a panel and a block of rows, the blocks of one panel one after the other.
struct Cut {
    int64_t block_rows, blocks, units, grain;
};

class Linear final : public Op {
  public:
    Linear(const pst_matrix& matrix, const Product& product, const pst_register& in, const pst_register* residual,
           const pst_register& out, const Norm& norm, const Epilogue& epilogue, int64_t capacity)
        : matrix_(matrix), product_(product), in_(in), residual_(residual ? *residual : out), out_(out), norm_(norm),
          epilogue_(epilogue), panels_(divided(matrix.rows, PANEL)),
          panel_bytes_(pst_panel_bytes(matrix.format, matrix.cols, matrix.group)),
          scale_bytes_(pst_panel_scale_bytes(matrix.format, matrix.cols, matrix.group)),
          row_bytes_(product.row_bytes(matrix.cols, matrix.group)),
          groups_(product.row_groups(matrix.cols, matrix.group)),
          few_(std::min(capacity, std::max<int64_t>(1, FEW_NUMBERS / matrix.cols))) {
        shared_rows_ = capacity > few_ ? capacity : 0;
        tile_at_ = norm.kind ? aligned(int64_t(matrix.cols) * 4) : 0;
        unpacked_at_ = tile_at_ + MAX_TILE_ROWS * PANEL * 4;
        rows_at_ = unpacked_at_ + (product.many ? aligned(product.unpacked_bytes(matrix.cols, matrix.group)) : 0);
        own_bytes = rows_at_ + prepared_bytes(few_);
        shared_bytes = prepared_bytes(shared_rows_);
    }

    void run(Team& team, const Context& context) const override {
        const int64_t count = context.rows(in_);
        if (!count) return;
        const bool few = count <= few_;
        const Prepared to = few ? prepared(context.own_scratch + rows_at_, few_)
                                : prepared(context.shared_scratch, shared_rows_);
        auto* normed = reinterpret_cast<float*>(context.own_scratch);
        if (few) {
            for (int64_t r = 0; r < count; r++) prepare(r, normed, to);
        } else {
            for (int64_t first, last; team.next(4, count, first, last);)
                for (int64_t r = first; r < last; r++) prepare(r, normed, to);
            team.barrier();
        }
        Rows rows{to.data, row_bytes_, to.scale, to.sums, groups_, int32_t(count)};
        multiply(team, context, rows);
    }

    void warm(const Team& team, const Context& context) const override {
        const int64_t count = context.rows(in_);
        if (!count || !streams(count)) return;
        const Cut c = cut(count, team.size);
        const int64_t piece = team.own_piece(divided(c.units, c.grain));
        if (piece < 0) return;
        const Panel first = panel(piece * c.grain / c.blocks);
        fetch(first.data, std::min(WARM_BYTES, panel_bytes_));
        fetch(first.scales, scale_bytes_);
    }

  private:
    static void fetch(const uint8_t* p, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
    }

    // Rows so few that a panel is read once, and the memory is what they wait for.
    bool streams(int64_t rows) const { return rows <= std::min<int64_t>(product_.tile_rows, ROW_STEP); }

    int64_t prepared_bytes(int64_t rows) const {
        return aligned(rows * row_bytes_) + aligned(rows * 4) + aligned(rows * groups_ * 4);
    }

    Prepared prepared(uint8_t* memory, int64_t rows) const {
        uint8_t* scale = memory + aligned(rows * row_bytes_);
        uint8_t* sums = scale + aligned(rows * 4);
        return {memory, reinterpret_cast<float*>(scale), reinterpret_cast<int32_t*>(sums)};
    }

    void prepare(int64_t r, float* normed, const Prepared& to) const {
        const float* x = in_.data + r * in_.stride;
        if (norm_.kind) {
            norm_row(x, matrix_.cols, norm_, normed);
            x = normed;
        }
        product_.prepare(x, matrix_.cols, matrix_.group, to.data + r * row_bytes_, to.scale + r, to.sums + r * groups_);
    }

    Cut cut(int64_t rows, int64_t threads) const {
        Cut c{rows, 1, panels_, 1};
        if (threads > 1 && panels_ < LONG_CLAIMS * threads && rows > BLOCK_ROWS) {
            int64_t wanted = std::min(divided(LONG_CLAIMS * threads, panels_), rows / BLOCK_ROWS);
            c.block_rows = divided(divided(rows, wanted), ROW_STEP) * ROW_STEP;
            c.blocks = divided(rows, c.block_rows);
            c.units = panels_ * c.blocks;
        }
        if (streams(rows))
            c.grain = std::max<int64_t>(1, std::min(CLAIM_BYTES / panel_bytes_, panels_ / (CLAIMS * threads)));
        return c;
    }

    void multiply(Team& team, const Context& context, const Rows& rows) const {
        const Cut c = cut(rows.count, team.size);
        const bool many = product_.many && c.block_rows >= product_.many_rows;
        auto* tile = reinterpret_cast<float*>(context.own_scratch + tile_at_);
        uint8_t* unpacked = context.own_scratch + unpacked_at_;
        Coming coming;
        for (int64_t first, last; team.next(c.grain, c.units, first, last);) {
            int64_t ready = -1;
            for (int64_t unit = first; unit < last; unit++) {
                const int64_t p = unit / c.blocks, from = unit % c.blocks * c.block_rows;
                Panel panel = this->panel(p);
                // Scales lie apart from the weights, in a stream too thin for the processor to follow.
                if (c.blocks == 1 && streams(rows.count)) fetch(panel.scales + scale_bytes_, scale_bytes_);
                if (many && ready != p) product_.unpack(panel, unpacked);
                ready = p;
                if (many) panel.data = unpacked;
                const int to = int(std::min<int64_t>(rows.count, from + c.block_rows));
                if (!many && to - from > FIRST_ROWS && unit % c.blocks == c.blocks - 1) {
                    coming = behind(p, to - int(from));
                    if (coming.bytes) panel.coming = &coming;
                }
                for (int r = int(from); r < to; r += product_.tile_rows) {
                    int count = std::min(product_.tile_rows, to - r);
                    await(p, r, count);
                    (many ? product_.many : product_.kernel)(rows, r, count, panel, tile);
                    finish(p, r, count, tile);
                }
            }
        }
    }

    // What of the panel behind panel p finds room beside it, for `rows` rows that meet that one first.
    Coming behind(int64_t p, int rows) const {
        Coming coming;
        if (p + 1 == panels_) return coming;
        coming.at = static_cast<const uint8_t*>(matrix_.data) + (p + 1) * panel_bytes_;
        coming.bytes = std::max<int64_t>(0, std::min(panel_bytes_, NEAR_BYTES - panel_bytes_));
        coming.rows = rows;
        return coming;
    }

    Panel panel(int64_t p) const {
        const auto* scales = static_cast<const uint8_t*>(matrix_.scales);
        return {static_cast<const uint8_t*>(matrix_.data) + p * panel_bytes_,
                scales ? scales + p * scale_bytes_ : nullptr, matrix_.cols, matrix_.group};
    }

    static void fetch_to_write(const float* p) {
#if defined(__x86_64__)
        asm volatile("prefetchw %0" : : "m"(*p));  // without -mprfchw the builtin fetches it for reading
#else
        __builtin_prefetch(p, 1);
#endif
    }

    // Asks for the lines that `finish` will write: their rows lie far apart, and a store that misses holds up others.
    void await(int64_t p, int64_t first, int count) const {
        const int64_t column = p * epilogue_.width();
        const int64_t width = std::min<int64_t>(epilogue_.width(), out_.width - column);
        for (int64_t r = 0; r < count; r++) {
            const float* to = out_.data + (first + r) * out_.stride + column;
            for (int64_t i = 0; i < width; i += 16) fetch_to_write(to + i);
        }
    }

    void finish(int64_t p, int64_t first, int count, const float* tile) const {
        const int64_t column = p * epilogue_.width();
        const float* bias = matrix_.bias ? matrix_.bias + p * PANEL : nullptr;
        for (int64_t r = 0; r < count; r++)
            epilogue_.row(tile + r * PANEL, bias, residual_.data + (first + r) * residual_.stride + column,
                          out_.data + (first + r) * out_.stride + column, int(out_.width - column));
    }

    pst_matrix matrix_;
    const Product& product_;
    pst_register in_, residual_, out_;
    Norm norm_;
    Epilogue epilogue_;
    int64_t panels_, panel_bytes_, scale_bytes_, row_bytes_;
    int32_t groups_;
    int64_t few_;          // rows that every thread prepares for itself
    int64_t shared_rows_;  // room for others
    int64_t tile_at_, unpacked_at_, rows_at_;  // in a thread's own scratch; the normed row is at 0
};

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

void check_matrix(const pst_matrix& m) {
    check(m.cols > 0 && m.rows > 0, "a matrix needs rows and columns");
    check(pst_panel_bytes(m.format, m.cols, m.group) > 0, "no format of matrices has this number or these groups");
    check(m.format == PST_M_I4 || !m.group, "only 4-bit weights have groups");
    check(m.format != PST_M_I8 || m.act != PST_A_I8 || m.cols <= MOST_BYTES_ADDED, "sums of so many bytes leave 32 bits");
    check(m.data && is_aligned(m.data), "the weights are missing or not aligned to 64 bytes");
    check(!pst_panel_scale_bytes(m.format, m.cols, m.group) || (m.scales && is_aligned(m.scales)),
          "the scales are missing or not aligned to 64 bytes");
    check(!m.pair || m.rows % 2 == 0, "a pair has as many gates as ups");
}

// Whether a row of one lies on a row of the other.
bool overlap(const pst_register& a, const pst_register& b, int64_t rows) {
    auto begin = [](const pst_register& r) { return reinterpret_cast<intptr_t>(r.data) / 4; };
    auto end = [&](const pst_register& r) { return begin(r) + (rows - 1) * r.stride + r.width; };
    if (end(a) <= begin(b) || end(b) <= begin(a)) return false;
    if (a.stride != b.stride || a.stride <= 0) return true;
    int64_t apart = (begin(b) - begin(a)) % a.stride;
    if (apart < 0) apart += a.stride;
    return apart < a.width || apart + b.width > a.stride;
}

Norm make_input_norm(const pst_op& op) {
    check(op.n[0] >= NORM_NONE && op.n[0] <= NORM_LAYER, "there is no such norm");
    check(op.n[0] == NORM_NONE || (op.f[0] >= 0.0f && std::isfinite(op.f[0])), "a norm's eps is 0 or larger");
    return {op.n[0], op.f[0], static_cast<const float*>(op.p[1]), static_cast<const float*>(op.p[2])};
}

Epilogue make_epilogue(const pst_op& op, const pst_matrix& matrix) {
    Epilogue e;
    e.kind = op.n[1];
    e.activation = op.n[2];
    e.limit = op.f[2];
    e.factor = op.f[1];
    e.residual = op.in[1] >= 0;
    check(e.kind >= Epilogue::PLAIN && e.kind <= Epilogue::GATED, "an output is plain, activated or gated");
    check((e.kind == Epilogue::GATED) == (matrix.pair != 0), "what is gated is a pair, and the other way round");
    const bool known = e.activation >= PST_SILU && e.activation <= PST_QUICK_GELU;
    check(e.kind == Epilogue::PLAIN || (known && (e.kind == Epilogue::GATED || e.activation != PST_SWIGLU_CLAMPED)),
          "there is no such activation here");
    return e;
}

}  // namespace

OpPtr make_linear(const pst_op& op, const Maker& maker) {
    const auto* matrix = static_cast<const pst_matrix*>(op.p[0]);
    check(matrix, "a product needs a matrix");
    check_matrix(*matrix);
    const Product* product = find_product(matrix->format, matrix->act);
    check(product, "rows of this kind do not meet matrices of this format");
    check(product->tile_rows >= 1 && product->tile_rows <= MAX_TILE_ROWS, "a kernel takes too many rows");
    Norm norm = make_input_norm(op);
    Epilogue epilogue = make_epilogue(op, *matrix);
    const pst_register &in = maker.reg(op.in[0]), &out = maker.reg(op.out);
    const pst_register* residual = epilogue.residual ? &maker.reg(op.in[1]) : nullptr;
    const int64_t capacity = maker.capacity(in);
    check(in.width == matrix->cols, "the input is as wide as the matrix has columns");
    check(out.width == matrix->rows / (matrix->pair ? 2 : 1), "the output is as wide as the matrix has rows");
    check(in.rows == out.rows, "input and output have rows of one kind");
    check(!overlap(in, out, capacity), "the output must not lie on the input");
    if (residual) {
        check(residual->width == out.width && residual->rows == out.rows, "what is added is as large as the output");
        check((residual->data == out.data && residual->stride == out.stride) || !overlap(*residual, out, capacity),
              "what is added is the output itself or lies elsewhere");
    }
    return std::make_unique<Linear>(*matrix, *product, in, residual, out, norm, epilogue, capacity);
}

}  // namespace pst
