// PST_LATENT: heads of rows, each times a matrix of its own.
//
// A head has few inputs, so its rows are made ready by whoever multiplies them, once for all panels of the head that it
// has claimed. Panels of all heads lie one after the other: at one token they come from memory as one stream.
#include <algorithm>
#include <cstring>

#include "block_rows.h"
#include "kernels.h"
#include "ops.h"

namespace pst {

namespace {

// Rows that meet a panel before the next one.
constexpr int64_t BLOCK_ROWS = 96;
// A claim at few rows, as long as that of PST_LINEAR.
constexpr int64_t CLAIM_BYTES = 96 * 1024;
constexpr int64_t CLAIMS = 4;  // per thread, below which one slow thread delays all

int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

class Latent final : public Op {
  public:
    Latent(const pst_matrix& matrix, const pst_register& in, const pst_register& out, int heads, int width, int rest,
           int64_t capacity)
        : matrix_(matrix), product_(find_product(matrix.format, matrix.act, matrix.code)), in_(in), out_(out),
          heads_(heads), width_(width), rest_(rest), panels_(divided(width, PANEL)), panel_bytes_(pst_panel_bytes(&matrix)),
          block_rows_(std::min(BLOCK_ROWS, capacity)) {
        const bool block = block_shape(matrix, shape_);
        group_ = block ? group_of_rows(matrix.cols, shape_.group, matrix.act) : 0;
        row_bytes_ = product_->row_bytes(matrix.cols, group_);
        tile_at_ = block_rows_ * row_bytes_;
        unpacked_at_ = tile_at_ + int64_t(product_->tile_rows) * PANEL * 4;
        own_bytes = unpacked_at_ + (product_->many ? aligned(product_->unpacked_bytes(matrix.cols)) : 0);
    }

    void run(Team& team, const Context& context) const override {
        const int64_t count = context.rows(in_);
        if (!count) return;
        const int64_t all_panels = panels_ * heads_, units = divided(count, block_rows_) * all_panels;
        auto* tile = reinterpret_cast<float*>(context.own_scratch + tile_at_);
        for (int64_t first, last; team.next(grain(units, team.size), units, first, last);) {
            int64_t ready = -1;
            for (int64_t unit = first; unit < last; unit++) {
                const int64_t from = unit / all_panels * block_rows_, panel = unit % all_panels, head = panel / panels_;
                const int rows = int(std::min(block_rows_, count - from));
                if (ready != unit / panels_) prepare(from, rows, head, context.own_scratch);
                ready = unit / panels_;
                if (panel % panels_ == 0) pass(from, rows, head);
                multiply(from, rows, panel, context.own_scratch, tile);
            }
        }
    }

    void warm(const Team& team, const Context& context) const override {
        const int64_t count = context.rows(in_), units = divided(count, block_rows_) * panels_ * heads_;
        if (!count) return;
        const int64_t each = grain(units, team.size), piece = team.own_piece(divided(units, each));
        if (piece < 0) return;
        const uint8_t* first = panel(piece * each % (panels_ * heads_));
        for (int64_t i = 0; i < std::min<int64_t>(4096, panel_bytes_); i += 64) __builtin_prefetch(first + i);
    }

  private:
    const uint8_t* panel(int64_t p) const { return static_cast<const uint8_t*>(matrix_.data) + p * panel_bytes_; }
    float* output(int64_t row, int64_t head) const { return out_.data + row * out_.stride + head * (width_ + rest_); }
    const float* input(int64_t row, int64_t head) const {
        return in_.data + row * in_.stride + head * (matrix_.cols + rest_);
    }

    int64_t grain(int64_t units, int threads) const {
        return std::max<int64_t>(1, std::min(std::max(panels_, CLAIM_BYTES / panel_bytes_), units / (CLAIMS * threads)));
    }

    void prepare(int64_t from, int rows, int64_t head, uint8_t* to) const {
        for (int r = 0; r < rows; r++, to += row_bytes_)
            product_->prepare(input(from + r, head), matrix_.cols, group_, to);
    }

    // What follows the first numbers of a head.
    void pass(int64_t from, int rows, int64_t head) const {
        for (int r = 0; rest_ && r < rows; r++)
            std::memcpy(output(from + r, head) + width_, input(from + r, head) + matrix_.cols, size_t(rest_) * 4);
    }

    void multiply(int64_t from, int count, int64_t p, uint8_t* scratch, float* tile) const {
        const bool many = product_->many && count >= product_->many_rows;
        Panel ready{panel(p), matrix_.cols};
        if (matrix_.format == PST_M_BLOCK) ready.block = &shape_;
        if (many) {
            product_->unpack(ready, scratch + unpacked_at_);
            ready.data = scratch + unpacked_at_;
        }
        const int column = int(p % panels_) * PANEL, width = std::min(PANEL, width_ - column);
        for (int r = 0; r < count; r += product_->tile_rows) {
            const int some = std::min(product_->tile_rows, count - r);
            (many ? product_->many : product_->kernel)({scratch, row_bytes_, count}, r, some, ready, tile);
            for (int i = 0; i < some; i++)
                std::memcpy(output(from + r + i, p / panels_) + column, tile + i * PANEL, size_t(width) * 4);
        }
    }

    pst_matrix matrix_;
    BlockShape shape_;
    const Product* product_;
    pst_register in_, out_;
    int heads_, width_, rest_;
    int32_t group_;
    int64_t panels_;  // of a head
    int64_t panel_bytes_, block_rows_, row_bytes_;
    int64_t tile_at_, unpacked_at_;  // in a thread's own scratch; ready rows are at 0
};

}  // namespace

OpPtr make_latent(const pst_op& op, const Maker& maker) {
    const auto* matrix = static_cast<const pst_matrix*>(op.p[0]);
    check(matrix, "a product needs a matrix");
    check_matrix(*matrix);
    check(!matrix->bias && !matrix->pair && !matrix->order, "matrices of heads have no bias, pair or order");
    const Product* product = find_product(matrix->format, matrix->act, matrix->code);
    check(product, "rows of this kind do not meet matrices of this format");
    const int heads = op.n[0], width = op.n[1], rest = op.n[3];
    check(heads > 0 && width > 0 && rest >= 0, "heads, and what they become, are some numbers");
    check(matrix->rows == heads * divided(width, PANEL) * PANEL, "every head has panels of its own");
    const pst_register &in = maker.reg(op.in[0]), &out = maker.reg(op.out);
    check(in.width == int64_t(heads) * (matrix->cols + rest), "query heads do not fill the register");
    check(out.width == int64_t(heads) * (width + rest), "what heads become does not fill the register");
    check(in.rows == out.rows, "input and output have rows of one kind");
    auto end = [&](const pst_register& r) { return r.data + (maker.capacity(r) - 1) * r.stride + r.width; };
    check(end(in) <= out.data || end(out) <= in.data, "the output must not lie on the input");
    return std::make_unique<Latent>(*matrix, in, out, heads, width, rest, maker.capacity(in));
}

}  // namespace pst
