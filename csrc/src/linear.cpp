// PST_LINEAR: norm, product, bias, activation and residual of a step's rows in one operation.
#include <algorithm>
#include <cmath>

#include "epilogue.h"
#include "norm_row.h"
#include "segment.h"

namespace pst {

namespace {

// How the work is cut: units are a panel and a block of rows. The panels of one block of rows follow each other where rows
// are what has to stay near, the blocks of one panel where it is the panel.
struct Cut {
    int64_t block_rows, blocks, units, grain;
    bool rows_stay;
};

// Outputs of one matrix, behind those of others.
struct Place : Segment {
    using Segment::Segment;
    int64_t first = 0;   // its first panel, of all
    int64_t column = 0;  // its first output
    size_t rows = 0;     // which of the preparations its rows are
};

class Linear final : public Op {
  public:
    Linear(const std::vector<pst_matrix>& matrices, const pst_register& in, const pst_register* residual,
           const pst_register& out, const Norm& norm, const Epilogue& epilogue, int64_t capacity)
        : cols_(matrices[0].cols), in_(in), residual_(residual ? *residual : out), out_(out), norm_(norm),
          epilogue_(epilogue), few_(std::min(capacity, std::max<int64_t>(1, FEW_NUMBERS / cols_))) {
        for (const pst_matrix& matrix : matrices) add(matrix);
        if (epilogue_.kind == Epilogue::PAIRED) segments_[0].columns = panels_ * PANEL;  // as they lie
        shared_rows_ = capacity > few_ ? capacity : 0;
        bool ordered = false, all_of_codes = true;
        int64_t unpacked = 0, tile_rows = 0, widest = 1;
        for (const Place& s : segments_) {
            ordered |= s.matrix.order != nullptr;
            all_of_codes &= s.matrix.format == PST_M_BLOCK && s.matrix.act == PST_A_I8;
            widest = std::max(widest, preparations_[s.rows].row_bytes);
            tile_rows = std::max<int64_t>(tile_rows, s.product->tile_rows);
            unpacked = std::max(unpacked, s.unpacked_bytes());
        }
        // Panels of codes are smaller than rows and come in one stream, so they rather come again.
        if (all_of_codes) near_rows_ = std::max(BLOCK_ROWS, NEAR_BYTES / widest / ROW_STEP * ROW_STEP);
        ordered_at_ = norm.kind ? aligned(int64_t(cols_) * 4) : 0;
        tile_at_ = ordered_at_ + (ordered ? aligned(int64_t(cols_) * 4) : 0);
        unpacked_at_ = tile_at_ + tile_rows * PANEL * 4;
        rows_at_ = unpacked_at_ + unpacked;
        own_bytes = rows_at_;
        for (const Preparation& p : preparations_) own_bytes += few_ * p.row_bytes, shared_bytes += shared_rows_ * p.row_bytes;
    }

    void run(Team& team, const Context& context) const override {
        const int64_t count = context.rows(in_);
        if (!count) return;
        const bool few = count <= few_;
        uint8_t* to = few ? context.own_scratch + rows_at_ : context.shared_scratch;
        const int64_t room = few ? few_ : shared_rows_;
        if (few) {
            for (int64_t r = 0; r < count; r++) prepare(r, context.own_scratch, to, room);
        } else {
            for (int64_t first, last; team.next(4, count, first, last);)
                for (int64_t r = first; r < last; r++) prepare(r, context.own_scratch, to, room);
            team.barrier();
        }
        multiply(team, context, count, to, room);
    }

    void warm(const Team& team, const Context& context) const override {
        const int64_t count = context.rows(in_);
        if (!count || !streams(count)) return;
        const Cut c = cut(count, team.size);
        const int64_t piece = team.own_piece(divided(c.units, c.grain));
        if (piece < 0) return;
        const int64_t p = piece * c.grain;
        const Place& segment = segment_of(p);
        segment.warm(p - segment.first);
    }

  private:
    void add(const pst_matrix& matrix) {
        Place s(matrix);
        s.first = panels_;
        s.column = columns_;
        const Preparation wanted = s.preparation();
        const auto found = std::find(preparations_.begin(), preparations_.end(), wanted);
        s.rows = size_t(found - preparations_.begin());
        if (found == preparations_.end()) preparations_.push_back(wanted);
        panels_ += s.panels;
        columns_ += s.columns;
        tile_rows_ = std::min(tile_rows_, s.product->tile_rows);
        largest_panel_ = std::max(largest_panel_, s.panel_bytes);
        segments_.push_back(s);
    }

    // Rows so few that a panel is read once, and the memory is what they wait for.
    bool streams(int64_t rows) const { return rows <= std::min<int64_t>(tile_rows_, ROW_STEP); }

    const Place& segment_of(int64_t panel) const {
        size_t i = 0;
        while (i + 1 < segments_.size() && panel >= segments_[i + 1].first) i++;
        return segments_[i];
    }

    // Row `r`, in every way that segments want it; `scratch` is the thread's own.
    void prepare(int64_t r, uint8_t* scratch, uint8_t* memory, int64_t room) const {
        const float* x = in_.data + r * in_.stride;
        if (norm_.kind) {
            auto* normed = reinterpret_cast<float*>(scratch);
            norm_row(x, cols_, norm_, normed);
            x = normed;
        }
        for (const Preparation& p : preparations_) {
            p.row(x, cols_, reinterpret_cast<float*>(scratch + ordered_at_), memory + r * p.row_bytes);
            memory += room * p.row_bytes;
        }
    }

    Cut cut(int64_t rows, int64_t threads) const {
        Cut c{rows, 1, panels_, 1, near_rows_ < rows};
        int64_t wanted = c.rows_stay ? divided(rows, near_rows_) : 1;
        if (threads > 1 && panels_ < LONG_CLAIMS * threads)
            wanted = std::max(wanted, std::min(divided(LONG_CLAIMS * threads, panels_), rows / BLOCK_ROWS));
        if (wanted > 1) {
            c.block_rows = divided(divided(rows, wanted), ROW_STEP) * ROW_STEP;
            c.blocks = divided(rows, c.block_rows);
            c.units = panels_ * c.blocks;
        }
        if (streams(rows))
            c.grain = std::max<int64_t>(1, std::min(CLAIM_BYTES / largest_panel_, panels_ / (CLAIMS * threads)));
        return c;
    }

    void multiply(Team& team, const Context& context, int64_t count, uint8_t* memory, int64_t room) const {
        const Cut c = cut(count, team.size);
        PanelRun run{reinterpret_cast<float*>(context.own_scratch + tile_at_), context.own_scratch + unpacked_at_};
        Coming coming;
        for (int64_t first, last; team.next(c.grain, c.units, first, last);) {
            for (int64_t unit = first; unit < last; unit++) {
                int64_t p = unit, from = 0;
                if (c.blocks > 1) {  // of few rows a panel takes little longer than a division
                    p = c.rows_stay ? unit % panels_ : unit / c.blocks;
                    from = (c.rows_stay ? unit / panels_ : unit % c.blocks) * c.block_rows;
                }
                const Place& segment = segment_of(p);
                const bool many = segment.product->many && c.block_rows >= segment.product->many_rows;
                const int to = int(std::min<int64_t>(count, from + c.block_rows));
                const bool ahead = !many && to - from > FIRST_ROWS && (c.rows_stay || to == count) && p + 1 < panels_;
                if (ahead) {
                    const Place& next = segment_of(p + 1);
                    coming = next.coming(p + 1 - next.first, segment.panel_bytes, to - int(from));
                }
                run.multiply(
                    segment, p - segment.first, rows_of(segment, memory, room, count), int(from), to, many,
                    ahead ? &coming : nullptr,
                    [&](int64_t r, int some) {
                        if (some <= AWAITED_ROWS) await(segment, p, r, some);
                    },
                    [&](int64_t r, int some, const float* tile) { finish(segment, p, r, some, tile); });
            }
        }
    }

    Rows rows_of(const Place& segment, uint8_t* memory, int64_t room, int64_t count) const {
        for (size_t i = 0; i < segment.rows; i++) memory += room * preparations_[i].row_bytes;
        return {memory, preparations_[segment.rows].row_bytes, int32_t(count)};
    }

    // Outputs of panel p of all, and how many there are.
    int64_t column_of(const Place& segment, int64_t p) const { return segment.column + (p - segment.first) * epilogue_.width(); }
    int64_t width_of(const Place& segment, int64_t p) const {
        return std::min<int64_t>(epilogue_.width(), segment.columns - (p - segment.first) * epilogue_.width());
    }

    // Asks for the lines that `finish` will write: their rows lie far apart, and a store that misses holds up others.
    void await(const Place& segment, int64_t p, int64_t first, int count) const {
        const int64_t column = column_of(segment, p), width = width_of(segment, p);
        for (int64_t r = 0; r < count; r++) {
            const float* to = out_.data + (first + r) * out_.stride + column;
            for (int64_t i = 0; i < width; i += 16) fetch_to_write(to + i);
        }
    }

    void finish(const Place& segment, int64_t p, int64_t first, int count, const float* tile) const {
        const int64_t column = column_of(segment, p);
        const float* bias = segment.bias(p - segment.first);
        for (int64_t r = 0; r < count; r++) {
            if (count > AWAITED_ROWS && r + AWAITED_AHEAD < count) await(segment, p, first + r + AWAITED_AHEAD, 1);
            epilogue_.row(tile + r * PANEL, bias, residual_.data + (first + r) * residual_.stride + column,
                          out_.data + (first + r) * out_.stride + column, int(width_of(segment, p)));
        }
    }

    int32_t cols_;
    std::vector<Place> segments_;
    std::vector<Preparation> preparations_;
    pst_register in_, residual_, out_;
    Norm norm_;
    Epilogue epilogue_;
    int64_t panels_ = 0, columns_ = 0, largest_panel_ = 1;
    int32_t tile_rows_ = MAX_TILE_ROWS;
    int64_t near_rows_ = INT32_MAX;  // rows that stay in the second cache while all panels meet them
    int64_t few_;          // rows that every thread prepares for itself
    int64_t shared_rows_;  // room for others
    int64_t ordered_at_, tile_at_, unpacked_at_, rows_at_;  // in a thread's own scratch; the normed row is at 0
};

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
    check(e.kind >= Epilogue::PLAIN && e.kind <= Epilogue::PAIRED, "an output is plain, activated or gated");
    check((e.kind >= Epilogue::GATED) == (matrix.pair != 0), "what is gated is a pair, and the other way round");
    const bool known = (e.activation >= PST_SILU && e.activation <= PST_QUICK_GELU) || is_clamped(e.activation);
    check(e.kind == Epilogue::PLAIN || e.kind == Epilogue::PAIRED || (known && (e.kind == Epilogue::GATED || !is_clamped(e.activation))),
          "there is no such activation here");
    return e;
}

}  // namespace

bool overlap(const pst_register& a, const pst_register& b, int64_t rows) {
    auto begin = [](const pst_register& r) { return reinterpret_cast<intptr_t>(r.data) / 4; };
    auto end = [&](const pst_register& r) { return begin(r) + (rows - 1) * r.stride + r.width; };
    if (end(a) <= begin(b) || end(b) <= begin(a)) return false;
    if (a.stride != b.stride || a.stride <= 0) return true;
    int64_t apart = (begin(b) - begin(a)) % a.stride;
    if (apart < 0) apart += a.stride;
    return apart < a.width || apart + b.width > a.stride;
}

OpPtr make_linear(const pst_op& op, const Maker& maker) {
    const auto* first = static_cast<const pst_matrix*>(op.p[0]);
    check(first, "a product needs a matrix");
    check(op.n[3] >= 0, "a product has one segment or more");
    const std::vector<pst_matrix> matrices(first, first + std::max(1, op.n[3]));
    int64_t outputs = 0;
    for (const pst_matrix& matrix : matrices) {
        check_segment(matrix);
        check(matrix.cols == first->cols, "segments have equally many columns");
        check(!matrix.pair || matrices.size() == 1, "a pair is the only segment");
        outputs += matrix.pair ? matrix.rows / 2 : matrix.rows;
    }
    Norm norm = make_input_norm(op);
    Epilogue epilogue = make_epilogue(op, *first);
    const pst_register &in = maker.reg(op.in[0]), &out = maker.reg(op.out);
    const pst_register* residual = epilogue.residual ? &maker.reg(op.in[1]) : nullptr;
    const int64_t capacity = maker.capacity(in);
    if (epilogue.kind == Epilogue::PAIRED) outputs = divided(first->rows, PANEL) * PANEL;
    check(in.width == first->cols, "the input is as wide as the matrix has columns");
    check(out.width == outputs, "the output is as wide as the matrix has rows");
    check(in.rows == out.rows, "input and output have rows of one kind");
    check(!overlap(in, out, capacity), "the output must not lie on the input");
    if (residual) {
        check(residual->width == out.width && residual->rows == out.rows, "what is added is as large as the output");
        check((residual->data == out.data && residual->stride == out.stride) || !overlap(*residual, out, capacity),
              "what is added is the output itself or lies elsewhere");
    }
    return std::make_unique<Linear>(matrices, in, residual, out, norm, epilogue, capacity);
}

}  // namespace pst
