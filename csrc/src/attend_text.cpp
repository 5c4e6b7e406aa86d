// Attention of encoders: PST_ATTEND_TEXT. Every token of a text sees those before and behind it; nothing is cached.
//
// Keys are taken in chunks of CHUNK at fixed places of a text, by the online softmax (Milakov & Gimelshein, arXiv
// 1805.02867): a token's chains of additions follow from its text alone, however its queries are grouped.
#include <algorithm>
#include <limits>

#include "attention_math.h"
#include "pieces.h"

namespace pst {

namespace {

#define PST_UNROLL _Pragma("GCC unroll 8")

constexpr int CHUNK = 256;    // keys whose scores exist at once
constexpr int QUERIES = 256;  // of a task at most
// Queries at a time, and vectors of keys or of components that they meet: as many sums as there are registers for.
#if defined(__AVX512F__)
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr int ROWS = 2, VECTORS = 2;
#endif
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

int up(int n, int to) { return (n + to - 1) / to * to; }

// out[r][C vectors] = (kept ? out : 0) + sum over i in first ... last-1 of x[r][i] * y[i][C vectors].
template <int C>
inline void products(const float* x, int x_stride, const float* y, int y_stride, int first, int last, bool kept,
                     float* out, int out_stride) {
    F sum[ROWS][C];
    PST_UNROLL
    for (int r = 0; r < ROWS; r++)
        PST_UNROLL
        for (int c = 0; c < C; c++) sum[r][c] = kept ? load(out + r * out_stride + c * LANES) : all(0.0f);
    for (int i = first; i < last; i++) {
        F with[C];
        PST_UNROLL
        for (int c = 0; c < C; c++) with[c] = load(y + int64_t(i) * y_stride + c * LANES);
        PST_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const F by = all(x[r * x_stride + i]);
            PST_UNROLL
            for (int c = 0; c < C; c++) sum[r][c] = fma(by, with[c], sum[r][c]);
        }
    }
    PST_UNROLL
    for (int r = 0; r < ROWS; r++)
        PST_UNROLL
        for (int c = 0; c < C; c++) store(out + r * out_stride + c * LANES, sum[r][c]);
}

// The same for `width` columns, a multiple of LANES.
inline void all_products(const float* x, int x_stride, const float* y, int y_stride, int first, int last, bool kept,
                         int width, float* out, int out_stride) {
    int c = 0;
    for (; c + VECTORS * LANES <= width; c += VECTORS * LANES)
        products<VECTORS>(x, x_stride, y + c, y_stride, first, last, kept, out + c, out_stride);
    for (; c < width; c += LANES) products<1>(x, x_stride, y + c, y_stride, first, last, kept, out + c, out_stride);
}

struct AttendText final : Op {
    View q, k, v, out;
    int heads, dim, padded, near;
    float scale;

    AttendText(const pst_op& op, const Maker& maker)
        : q(maker.reg(op.in[0])), k(maker.reg(op.in[1])), v(maker.reg(op.in[2])), out(maker.reg(op.out)), heads(op.n[0]),
          near(op.n[1]), scale(op.f[0]) {
        check(heads > 0 && out.width % heads == 0, "heads of equal width fill their registers");
        check(near >= 0, "how far a token sees is no negative number");
        for (int i = 0; i < 3; i++) {
            check(maker.reg(op.in[i]).width == out.width, "queries, keys and values are as wide as what comes out");
            check(maker.reg(op.in[i]).rows == PST_ROWS_TOKENS, "queries, keys and values are of tokens");
        }
        check(maker.reg(op.out).rows == PST_ROWS_TOKENS, "every token gets its sum");
        dim = out.width / heads;
        padded = up(dim, LANES);
        own_bytes = int64_t(sizeof(float)) * numbers();
    }
    // Keys with components as rows, values, queries, sums of values, then scores, largest scores and sums of weights.
    int64_t numbers() const {
        return int64_t(dim) * CHUNK + int64_t(CHUNK) * padded + int64_t(QUERIES + ROWS) * (dim + padded + 2) + ROWS * CHUNK + 64;
    }

    void run(Team& team, const Context& context) const override {
        const pst_step& step = context.step;
        int64_t tasks = 0;
        for (int b = 0; b < step.num_seqs; b++) tasks += tasks_of(step, b);
        int b = 0;
        int64_t before = 0;  // tasks of sequences before b
        for (int64_t first, last; team.next(1, tasks, first, last);)
            for (int64_t task = first; task < last; task++) {
                if (task < before) b = 0, before = 0;
                for (; task >= before + tasks_of(step, b); b++) before += tasks_of(step, b);
                attend(step, b, int(task - before), reinterpret_cast<float*>(context.own_scratch));
            }
    }
    static int length(const pst_step& step, int b) { return step.query_start_loc[b + 1] - step.query_start_loc[b]; }
    int64_t tasks_of(const pst_step& step, int b) const {
        return int64_t(heads) * ((length(step, b) + QUERIES - 1) / QUERIES);
    }

    void attend(const pst_step& step, int b, int task, float* memory) const {
        const int count = length(step, b), from = task / heads * QUERIES, column = task % heads * dim;
        const int num = std::min(QUERIES, count - from);
        const int64_t text = step.query_start_loc[b];
        float *keys = memory, *values = keys + dim * CHUNK, *queries = values + CHUNK * padded,
              *sums = queries + (QUERIES + ROWS) * dim, *scores = sums + (QUERIES + ROWS) * padded,
              *tops = scores + ROWS * CHUNK, *totals = tops + QUERIES + ROWS;
        if (step.positions[text] != 0) {
            for (int i = 0; i < num; i++)
                std::fill_n(out.row(text + from + i) + column, dim, std::numeric_limits<float>::quiet_NaN());
            return;
        }
        for (int i = 0; i < up(num, ROWS); i++) {  // those behind the last repeat it, and nobody looks at them
            std::memcpy(queries + i * dim, q.row(text + from + std::min(i, num - 1)) + column, size_t(dim) * sizeof(float));
            std::fill_n(sums + i * padded, padded, 0.0f);
            tops[i] = NOTHING, totals[i] = 0.0f;
        }
        const int least = near ? std::max(0, from - near + 1) : 0, most = near ? std::min(count, from + num + near - 1) : count;
        for (int start = least / CHUNK * CHUNK; start < most; start += CHUNK) {
            const int here = std::min(CHUNK, count - start);
            take(text + start, here, column, keys, values);
            for (int i = 0; i < num; i += ROWS)
                meet(from + i, from + num, start, here, keys, values, queries + i * dim, scores, sums + i * padded, tops + i,
                     totals + i);
        }
        for (int i = 0; i < num; i++) {
            float* row = out.row(text + from + i) + column;
            const F by = all(totals[i]);
            for (int c = 0; c < dim; c += LANES) {
                const int lanes = std::min(LANES, dim - c);
                store(row + c, load(sums + i * padded + c, lanes) / by, lanes);
            }
        }
    }
    void take(int64_t first, int count, int column, float* keys, float* values) const {
        const int padding = up(count, LANES);
        for (int j = 0; j < count; j++) {
            const float* key = k.row(first + j) + column;
            for (int d = 0; d < dim; d++) keys[d * CHUNK + j] = key[d];
            float* value = values + j * padded;
            std::memcpy(value, v.row(first + j) + column, size_t(dim) * sizeof(float));
            std::fill(value + dim, value + padded, 0.0f);
        }
        for (int d = 0; d < dim && count < padding; d++) std::fill(keys + d * CHUNK + count, keys + d * CHUNK + padding, 0.0f);
    }
    // ROWS queries, the first at `place` of its text, and the chunk of `count` keys at `start`; `end` ends the queries.
    void meet(int place, int end, int start, int count, const float* keys, const float* values, const float* queries,
              float* scores, float* sums, float* tops, float* totals) const {
        const int width = up(count, LANES);
        int least = count, most = 0, low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) {
            const int at = std::min(place + r, end - 1) - start;
            low[r] = near ? std::max(0, at - near + 1) : 0;
            high[r] = near ? std::min(count, at + near) : count;
            if (low[r] < high[r]) least = std::min(least, low[r]), most = std::max(most, high[r]);
        }
        if (least >= most) return;
        all_products(queries, dim, keys, CHUNK, 0, dim, false, width, scores, CHUNK);
        for (int r = 0; r < ROWS; r++) {
            float* row = scores + r * CHUNK;
            if (low[r] >= high[r]) {
                std::fill_n(row, width, 0.0f);
                continue;
            }
            std::fill(row, row + low[r], NOTHING);
            std::fill(row + high[r], row + width, NOTHING);
            F best = all(NOTHING);
            for (int j = 0; j < width; j += LANES) best = max(best, load(row + j));
            // A softmax of scores times a positive number has its largest where they have theirs.
            const float top = std::max(tops[r], pst::top(best) * scale), factor = lone_exp(tops[r] - top);
            F total = all(0.0f);
            for (int j = 0; j < width; j += LANES) {
                const F weight = exp(fma(load(row + j), all(scale), all(-top)));
                store(row + j, weight);
                total = total + weight;
            }
            tops[r] = top;
            totals[r] = totals[r] * factor + sum(total);
            if (factor != 1.0f) map(sums + r * padded, sums + r * padded, padded, [&](F x) { return x * all(factor); });
        }
        all_products(scores, CHUNK, values, padded, least, most, true, padded, sums, padded);
    }
    static float lone_exp(float x) {
        float lanes[LANES];
        store(lanes, exp(all(x)));
        return lanes[0];
    }
};

#undef PST_UNROLL

}  // namespace

OpPtr make_attend_text(const pst_op& op, const Maker& maker) { return std::make_unique<AttendText>(op, maker); }

}  // namespace pst
