// Operations on whole rows: taking them from a table, choosing some, finding the largest number of each.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "pieces.h"

namespace pst {

OpPtr make_row_op(const pst_op& op, const Maker& maker);

namespace {

struct Embed final : Op {
    View out;
    const uint8_t* table;
    const pst_matrix* matrix;
    int32_t dtype, num_rows, words;
    bool by_position, by_type;
    float factor;

    Embed(const pst_op& op, const Maker& maker)
        : out(maker.reg(op.out)), table(static_cast<const uint8_t*>(op.p[0])),
          matrix(static_cast<const pst_matrix*>(op.p[1])), dtype(op.n[0]), num_rows(op.n[2]), words(op.n[3]),
          by_position(op.n[1] == 1), by_type(op.n[4] == 1), factor(op.f[0]) {
        check(table || matrix, "an embedding needs a table");
        check(matrix || (dtype >= PST_F32 && dtype <= PST_BF16), "a table is of float32, float16 or bfloat16");
        if (matrix) {
            check_matrix(*matrix);
            check(!matrix->pair && !matrix->order, "a table is neither a pair nor in an order of its own");
            check(matrix->cols == out.width, "an embedding is as wide as its table");
        }
        check(op.n[1] == 0 || op.n[1] == 1, "a table is looked up by token ids (0) or positions (1)");
        check(words >= 0 && (op.n[4] == 0 || op.n[4] == 1), "words of ids are counted, and one part of two is looked up");
        check(maker.reg(op.out).rows == PST_ROWS_TOKENS, "an embedding fills rows of tokens");
    }
    void run(Team& team, const Context& context) const override {
        const int32_t* given = by_position ? context.step.positions : context.step.token_ids;
        auto id = [&](int64_t t) {
            const int32_t part = !words ? given[t] : by_type ? given[t] / words : given[t] % words;
            return num_rows && part >= num_rows ? 0 : part;
        };
        if (matrix) {
            for (int64_t first, last; team.next(1, context.step.num_tokens, first, last);)
                for (int64_t t = first; t < last; t++) {
                    matrix_row(*matrix, id(t), out.row(t));
                    scale(out.row(t), out.width);
                }
            return;
        }
        int64_t item = dtype == PST_F32 ? 4 : 2;
        each_piece(team, context.step.num_tokens, out.width, [&](int64_t t, int64_t from, int64_t to) {
            float* row = out.row(t) + from;
            widen(table + (int64_t(id(t)) * out.width + from) * item, dtype, to - from, row);
            scale(row, to - from);
        });
    }
    void scale(float* row, int64_t n) const {
        if (factor != 1.0f) map(row, row, n, [by = factor](F x) { return x * all(by); });
    }
};

struct Select final : Op {
    View in, out;

    Select(const pst_op& op, const Maker& maker) : in(maker.reg(op.in[0])), out(maker.reg(op.out)) {
        check(in.width == out.width, "selected rows are as wide as what they are selected from");
        check(maker.reg(op.in[0]).rows == PST_ROWS_TOKENS && maker.reg(op.out).rows == PST_ROWS_SELECTED,
              "rows are selected from those of tokens");
    }
    void run(Team& team, const Context& context) const override {
        each_piece(team, context.step.num_rows, out.width, [&](int64_t r, int64_t from, int64_t to) {
            std::memcpy(out.row(r) + from, in.row(context.step.rows[r]) + from, size_t(to - from) * sizeof(float));
        });
    }
};

// The largest of a piece, and whether all of it is finite. Where the largest is, is looked for once it is known which
// piece holds it. Of a piece that is not finite, `largest` says nothing.
struct Best {
    float largest;
    bool finite;
};

Best best_of(const float* x, int64_t n) {
    constexpr int CHAINS = 4;
    const F lowest = all(-std::numeric_limits<float>::infinity()), zero = all(0.0f);
    F top[CHAINS] = {lowest, lowest, lowest, lowest};
    F wrong[CHAINS] = {zero, zero, zero, zero};  // 0 * x is 0 unless x is not finite, then NaN; and NaN stays
    auto take = [&](int chain, F v) {
        top[chain] = max(top[chain], v);
        wrong[chain] = fma(v, zero, wrong[chain]);
    };
    int64_t i = 0;
    for (; i + CHAINS * LANES <= n; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS; c++) take(c, load(x + i + c * LANES));
    for (; i + LANES <= n; i += LANES) take(0, load(x + i));
    float best = largest(max(max(top[0], top[1]), max(top[2], top[3])));
    bool finite = sum((wrong[0] + wrong[1]) + (wrong[2] + wrong[3])) == 0.0f;
    for (; i < n; i++) {
        best = x[i] > best ? x[i] : best;
        finite = finite && std::isfinite(x[i]);
    }
    return {best, finite};
}

// As numpy.argmax: the first NaN if there is one. Only for rows that are not finite.
int64_t first_largest(const float* x, int64_t n) {
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        if (std::isnan(x[i])) return i;
        if (x[i] > x[at]) at = i;
    }
    return at;
}

template <class T>
T* room(const void* p) {
    return static_cast<T*>(const_cast<void*>(p));
}

struct Argmax final : Op {
    View in;
    pst_register shape;
    int64_t pieces;
    int32_t* index;
    float* value;
    uint8_t* finite;

    Argmax(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), shape(maker.reg(op.in[0])), pieces((in.width + PIECE - 1) / PIECE),
          index(room<int32_t>(op.p[0])), value(room<float>(op.p[1])), finite(room<uint8_t>(op.p[2])) {
        check(index && value && finite, "an argmax needs room for indices, values and whether rows are finite");
        shared_bytes = int64_t(sizeof(Best)) * pieces * maker.capacity(shape);
    }
    void run(Team& team, const Context& context) const override {
        Best* best = reinterpret_cast<Best*>(context.shared_scratch);
        int64_t rows = context.rows(shape);
        each_piece(team, rows, in.width, [&](int64_t row, int64_t from, int64_t to) {
            best[row * pieces + from / PIECE] = best_of(in.row(row) + from, to - from);
        });
        team.barrier();
        for (int64_t first, last; team.next(1, rows, first, last);)
            for (int64_t row = first; row < last; row++) finish(row, best + row * pieces);
    }
    void finish(int64_t row, const Best* best) const {
        const float* x = in.row(row);
        int64_t top = 0;
        bool all_finite = true;
        for (int64_t p = 0; p < pieces; p++) {
            all_finite = all_finite && best[p].finite;
            if (best[p].largest > best[top].largest) top = p;
        }
        int64_t at = top * PIECE;
        if (all_finite)
            while (at + 1 < in.width && x[at] != best[top].largest) at++;
        else
            at = first_largest(x, in.width);
        index[row] = int32_t(at);
        value[row] = x[at];
        finite[row] = all_finite;
    }
};

}  // namespace

OpPtr make_row_op(const pst_op& op, const Maker& maker) {
    switch (op.kind) {
        case PST_EMBED: return std::make_unique<Embed>(op, maker);
        case PST_SELECT: return std::make_unique<Select>(op, maker);
        case PST_ARGMAX: return std::make_unique<Argmax>(op, maker);
    }
    throw Misfit("no such operation");
}

}  // namespace pst
