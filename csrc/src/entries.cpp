// Entries that several tokens share: PST_WRITE_ENTRIES, CHOOSE_ENTRIES, ATTEND_ENTRIES.
//
// The law that every bit follows from: an entry is made of the numbers that its tokens have left in their pages, whoever
// runs the last of them; a token meets the keys of its window and then its entries, in order, sixteen at a time from the
// first key of its window on, and from its first entry on. What is missing in the last sixteen weighs an exact zero.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>

#include "activation.h"
#include "cache.h"
#include "norm_row.h"
#include "pieces.h"
#include "rotary.h"
#include "stored.h"

namespace pst {

namespace {

int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The keys of one layer, one head: by slot, or one per `every` tokens in the page of the last of them.
struct Keys {
    pst_plane plane, scales;
    int group, layer, dim;

    Keys(const Maker& maker, int group, int layer, int number, int dim)
        : plane(maker.plane(group, number)), scales(scales_of(maker, group, plane)), group(group), layer(layer), dim(dim) {
        check(layer >= 0, "no such layer");
        check(check_plane(plane, 1, dim) == 1, "keys of one head are kept together");
    }
    Pages pages(const pst_step& step, int sequence) const { return Pages(step.groups[group], sequence, layer); }

    // As float32 [dim], zeros up to whole lanes behind them.
    void read(int64_t page, int row, float* out) const {
        const uint8_t* from = number(plane, page, row, 0);
        F by = all(1.0f);
        if (plane.dtype == PST_I8) by = all(*reinterpret_cast<const float*>(number(scales, page, row, 0)));
        for (int i = 0; i < dim; i += LANES) {
            F x = load_row(from, plane.dtype, i, dim);
            store(out + i, plane.dtype == PST_I8 ? x * by : x);
        }
    }
    void read_slot(const Pages& pages, int64_t slot, float* out) const {
        read(pages.page(int(slot / pages.block_size)), int(slot % pages.block_size), out);
    }
};

// Where entry `number` of a sequence is: in the block of its last token, behind those that end there before it.
struct EntryPlace {
    int64_t page;
    int row;

    EntryPlace(const Pages& pages, int64_t number, int every) {
        const int64_t block = (number * every + every - 1) / pages.block_size;
        page = pages.page(int(block));
        row = int(number - block * pages.block_size / every);
    }
};

// Sixteen keys side by side: tile[i * 16 + j] is component i of key j.
void turn_over(const float* rows, int64_t stride, int dim, float* tile) {
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < dim; i++) tile[i * LANES + j] = rows[j * stride + i];
}

// Of `heads` queries [dim] the products with sixteen keys: out[h * 16 + j], one chain over the components each.
void products(const float* q, int heads, int dim, const float* tile, float* out) {
    int h = 0;
    for (; h + 4 <= heads; h += 4) {
        F s[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
        const float* at = q + int64_t(h) * dim;
        for (int i = 0; i < dim; i++) {
            const F k = load(tile + i * LANES);
            for (int n = 0; n < 4; n++) s[n] = fma(all(at[int64_t(n) * dim + i]), k, s[n]);
        }
        for (int n = 0; n < 4; n++) store(out + (h + n) * LANES, s[n]);
    }
    for (; h < heads; h++) {
        F s = all(0.0f);
        for (int i = 0; i < dim; i++) s = fma(all(q[int64_t(h) * dim + i]), load(tile + i * LANES), s);
        store(out + h * LANES, s);
    }
}

// The sequence of token t, and the entries that it sees.
int sequence_of(const pst_step& step, int64_t t) {
    int b = 0;
    while (step.query_start_loc[b + 1] <= t) b++;
    return b;
}

struct WriteEntries final : Op {
    pst_plane value, score;
    Keys entries;
    int group, layer, every, series, half, positions;
    bool interleaved;
    float eps;
    const float *bias, *weight, *table;

    WriteEntries(const pst_op& op, const Maker& maker)
        : value(maker.plane(op.n[0], op.n[2])), score(maker.plane(op.n[0], op.n[3])),
          entries(maker, op.n[4], op.n[5], op.n[6], maker.plane(op.n[4], op.n[6]).dim), group(op.n[0]), layer(op.n[1]),
          every(op.n[7]), series(op.n[8] ? 2 : 1), half(op.n[11]), positions(op.n[9]), interleaved(op.n[10] != 0),
          eps(op.f[0]), bias(static_cast<const float*>(op.p[0])), weight(static_cast<const float*>(op.p[1])),
          table(static_cast<const float*>(op.p[2])) {
        check(layer >= 0 && every > 0, "entries are of a layer, and of a token at least");
        const int wide = series * entries.dim;
        for (const pst_plane* p : {&value, &score})
            check(p->dtype == PST_F32 && p->heads == 1 && p->dim == wide, "a plane does not hold what entries are made of");
        check(bias && weight && table && positions > 0, "entries need a bias, a norm's weights and a table");
        check(half > 0 && 2 * half <= entries.dim, "an entry is smaller than what turns");
        own_bytes = aligned(padded(wide) * 4);
        keeps_state = true;  // which follows one path
    }

    void run(Team& team, const Context& context) const override {
        const pst_step& step = context.step;
        int64_t total = 0;
        for (int b = 0; b < step.num_seqs; b++) total += count(step, b);
        for (int64_t i, end; team.next(1, total, i, end);)
            for (; i < end; i++) {
                int b = 0;
                int64_t at = i;
                while (at >= count(step, b)) at -= count(step, b++);
                make(step, b, start(step, b) / every + at, reinterpret_cast<float*>(context.own_scratch));
            }
    }
    static int64_t start(const pst_step& step, int b) { return step.positions[step.query_start_loc[b]]; }
    int64_t count(const pst_step& step, int b) const {
        const int64_t tokens = step.query_start_loc[b + 1] - step.query_start_loc[b];
        return tokens ? (start(step, b) + tokens) / every - start(step, b) / every : 0;
    }

    // Component c of what token `slot` gives, number `which` of its series.
    static const float* given(const pst_plane& plane, const Pages& pages, int64_t slot) {
        return reinterpret_cast<const float*>(
            number(plane, pages.page(int(slot / pages.block_size)), int(slot % pages.block_size), 0));
    }
    void make(const pst_step& step, int b, int64_t number, float* x) const {
        const Pages pages(step.groups[group], b, layer);
        const int dim = entries.dim;
        const int64_t own = number * every, first = series == 2 && number ? own - every : own, last = own + every;
        for (int c = 0; c < dim; c += LANES) {
            const int lanes = std::min(LANES, dim - c);
            auto scores = [&](int64_t t) {
                const int from = series == 2 && t >= own ? dim + c : c;
                return load_part(given(score, pages, t) + from, lanes) +
                       load_part(bias + (t % every) * int64_t(series) * dim + from, lanes);
            };
            F most = scores(first);
            for (int64_t t = first + 1; t < last; t++) most = max(most, scores(t));
            F total = all(0.0f), sum = all(0.0f);
            for (int64_t t = first; t < last; t++) {
                const F e = exp(scores(t) - most);
                const int from = series == 2 && t >= own ? dim + c : c;
                total = total + e;
                sum = fma(load_part(given(value, pages, t) + from, lanes), e, sum);
            }
            store_part(x + c, sum / total, lanes);
        }
        Norm norm;
        norm.kind = NORM_RMS;
        norm.eps = eps;
        norm.weight = weight;
        norm_row(x, dim, norm, x);
        const float* cosines = table + own * half;
        turn_head(x + dim - 2 * half, cosines, cosines + int64_t(positions) * half, half, interleaved);
        const EntryPlace at(entries.pages(step, b), number, every);
        keep_row(entries.plane, entries.scales, at.page, at.row, x);
    }
};

struct ChooseEntries final : Op {
    View q, weights, out;
    Keys entries;
    int every, heads, dim, most;
    float scale;

    ChooseEntries(const pst_op& op, const Maker& maker)
        : q(maker.reg(op.in[0])), weights(maker.reg(op.in[1])), out(maker.reg(op.out)),
          entries(maker, op.n[0], op.n[1], op.n[2], op.n[5]), every(op.n[3]), heads(op.n[4]), dim(op.n[5]), most(op.n[6]),
          scale(op.f[0]) {
        check(every > 0 && heads > 0 && most >= 0, "entries are of a token at least, and chosen by a head at least");
        check(q.width == int64_t(heads) * dim && weights.width == heads, "heads do not fill the register");
        for (int32_t number : {op.in[0], op.in[1], op.out})
            check(maker.reg(number).rows == PST_ROWS_TOKENS, "only rows of tokens have entries");
        worth_at_ = aligned(padded(dim) * LANES * 4 * 2) + aligned(int64_t(heads) * LANES * 4);
        order_at_ = worth_at_ + aligned(padded(most) * 4);
        own_bytes = order_at_ + aligned(padded(most) * 4);
        keeps_state = true;
    }

    void run(Team& team, const Context& context) const override {
        for (int64_t t, end; team.next(1, context.step.num_tokens, t, end);)
            for (; t < end; t++) token(context.step, t, context.own_scratch);
    }
    void token(const pst_step& step, int64_t t, uint8_t* scratch) const {
        const int64_t seen = std::min<int64_t>((int64_t(step.positions[t]) + 1) / every, most);
        float* to = out.row(t);
        for (int i = 0; i < out.width; i++) to[i] = i < seen ? float(i) : -1.0f;
        if (seen <= out.width) return;
        auto* rows = reinterpret_cast<float*>(scratch);
        float* tile = rows + padded(dim) * LANES;
        float* scores = tile + padded(dim) * LANES;
        auto* worth = reinterpret_cast<float*>(scratch + worth_at_);
        auto* order = reinterpret_cast<int32_t*>(scratch + order_at_);
        const Pages pages = entries.pages(step, sequence_of(step, t));
        for (int64_t first = 0; first < seen; first += LANES) {
            for (int j = 0; j < LANES; j++) {
                const EntryPlace at(pages, std::min(first + j, seen - 1), every);
                entries.read(at.page, at.row, rows + j * padded(dim));
            }
            turn_over(rows, padded(dim), dim, tile);
            products(q.row(t), heads, dim, tile, scores);
            F total = all(0.0f);
            for (int h = 0; h < heads; h++)
                total = fma(max(all(0.0f), load(scores + h * LANES) * all(scale)), all(weights.row(t)[h]), total);
            store(worth + first, total);
        }
        for (int64_t i = 0; i < seen; i++) order[i] = int32_t(i);
        // The best first, equals in their order; a NaN is worth least.
        auto better = [&](int32_t a, int32_t b) {
            const int32_t x = key(worth[a]), y = key(worth[b]);
            return x != y ? x > y : a < b;
        };
        std::nth_element(order, order + out.width, order + seen, better);
        std::sort(order, order + out.width);
        for (int i = 0; i < out.width; i++) to[i] = float(order[i]);
    }
    // Whole numbers in the order of floats, a NaN below all, the two zeros equal.
    static int32_t key(float x) {
        if (std::isnan(x)) return INT_MIN;
        x += 0.0f;
        int32_t bits;
        std::memcpy(&bits, &x, 4);
        return bits ^ (bits >> 31 & INT_MAX);
    }

  private:
    int64_t worth_at_, order_at_;
};

struct AttendEntries final : Op {
    View q, out;
    pst_register chosen;
    bool chooses;
    Keys near, far;
    int every, window, heads, dim;
    float scale;
    const float* sinks;

    AttendEntries(const pst_op& op, const Maker& maker)
        : q(maker.reg(op.in[0])), out(maker.reg(op.out)), chosen(), chooses(op.in[1] >= 0),
          near(maker, op.n[0], op.n[1], op.n[2], op.n[9]), far(maker, op.n[3], op.n[4], op.n[5], op.n[9]), every(op.n[6]),
          window(op.n[7]), heads(op.n[8]), dim(op.n[9]), scale(op.f[0]), sinks(static_cast<const float*>(op.p[0])) {
        check(every > 0 && window > 0 && heads > 0 && sinks, "attention to entries needs a window, heads and sinks");
        check(q.width == int64_t(heads) * dim && out.width == q.width, "heads do not fill the register");
        for (int32_t number : {op.in[0], op.out})
            check(maker.reg(number).rows == PST_ROWS_TOKENS, "only rows of tokens have entries");
        if (chooses) chosen = maker.reg(op.in[1]);
        check(!chooses || chosen.rows == PST_ROWS_TOKENS, "only rows of tokens have entries");
        tile_at_ = aligned(padded(dim) * LANES * 4);
        score_at_ = 2 * tile_at_;
        sums_at_ = score_at_ + aligned(int64_t(heads) * LANES * 4);
        out_at_ = sums_at_ + aligned(int64_t(heads) * (LANES + 1) * 4);
        own_bytes = out_at_ + aligned(int64_t(heads) * padded(dim) * 4);
        keeps_state = true;
    }

    void run(Team& team, const Context& context) const override {
        // Few tokens: their heads part, and each part reads the keys.
        const int64_t tokens = context.step.num_tokens;
        const int parts = tokens >= 2 * team.size ? 1 : std::min(heads, team.size);
        for (int64_t i, end; team.next(1, tokens * parts, i, end);)
            for (; i < end; i++) {
                const int part = int(i % parts), from = heads * part / parts, to = heads * (part + 1) / parts;
                if (from < to) token(context.step, i / parts, from, to - from, context.own_scratch);
            }
    }

    void token(const pst_step& step, int64_t t, int first, int count, uint8_t* scratch) const {
        auto* rows = reinterpret_cast<float*>(scratch);
        auto* sums = reinterpret_cast<float*>(scratch + sums_at_);  // [count][16], then the largest scores [count]
        auto* total = reinterpret_cast<float*>(scratch + out_at_);
        float* most = sums + count * LANES;
        const int64_t stride = padded(dim), position = step.positions[t];
        // The sink is the first score: it weighs 1, and carries nothing.
        std::memset(sums, 0, size_t(count) * LANES * 4);
        std::memset(total, 0, size_t(count) * size_t(stride) * 4);
        for (int h = 0; h < count; h++) most[h] = sinks[first + h], sums[h * LANES] = 1.0f;
        const int b = sequence_of(step, t);
        const Pages slots = near.pages(step, b), places = far.pages(step, b);
        const int64_t begin = std::max<int64_t>(0, position + 1 - window);
        for (int64_t at = begin; at <= position; at += LANES) {
            const int n = int(std::min<int64_t>(LANES, position + 1 - at));
            for (int j = 0; j < n; j++) near.read_slot(slots, at + j, rows + j * stride);
            meet(q.row(t) + int64_t(first) * dim, count, n, scratch);
        }
        const int64_t seen = (position + 1) / every, wanted = chooses ? std::min<int64_t>(chosen.width, seen) : seen;
        const float* choice = chooses ? chosen.data + t * chosen.stride : nullptr;
        for (int64_t at = 0; at < wanted; at += LANES) {
            const int n = int(std::min<int64_t>(LANES, wanted - at));
            for (int j = 0; j < n; j++) {
                const EntryPlace place(places, choice ? int64_t(choice[at + j]) : at + j, every);
                far.read(place.page, place.row, rows + j * stride);
            }
            meet(q.row(t) + int64_t(first) * dim, count, n, scratch);
        }
        for (int h = 0; h < count; h++) {
            const F by = all(sum(load(sums + h * LANES)));
            float* to = out.row(t) + int64_t(first + h) * dim;
            for (int i = 0; i < dim; i += LANES)
                store_part(to + i, load(total + h * stride + i) / by, std::min(LANES, dim - i));
        }
    }

    // `count` queries meet n keys: what they have summed so far, and the keys' values, which are the keys.
    void meet(const float* queries, int count, int n, uint8_t* scratch) const {
        auto* rows = reinterpret_cast<float*>(scratch);
        auto* tile = reinterpret_cast<float*>(scratch + tile_at_);
        auto* scores = reinterpret_cast<float*>(scratch + score_at_);
        auto* sums = reinterpret_cast<float*>(scratch + sums_at_);
        auto* total = reinterpret_cast<float*>(scratch + out_at_);
        float* most = sums + count * LANES;
        const int64_t stride = padded(dim);
        for (int j = n; j < LANES; j++) std::memset(rows + j * stride, 0, size_t(stride) * 4);
        turn_over(rows, stride, dim, tile);
        products(queries, count, dim, tile, scores);
        for (int h = 0; h < count; h++) {
            float* s = scores + h * LANES;
            store(s, load(s) * all(scale));
            for (int j = n; j < LANES; j++) s[j] = -HUGE_VALF;
            float top = most[h];
            for (int j = 0; j < n; j++) top = s[j] > top ? s[j] : top;
            float kept[LANES];
            store(kept, exp(all(most[h] - top)));
            most[h] = top;
            F weight = exp(load(s) - all(top));
            store(s, weight);
            for (int j = n; j < LANES; j++) s[j] = 0.0f;
            const F old = all(kept[0]);
            store(sums + h * LANES, fma(load(sums + h * LANES), old, load(s)));
            float* o = total + h * stride;
            for (int64_t i = 0; i < stride; i += LANES) {
                F x = load(o + i) * old;
                for (int j = 0; j < n; j++) x = fma(all(s[j]), load(rows + j * stride + i), x);
                store(o + i, x);
            }
        }
    }

  private:
    int64_t tile_at_, score_at_, sums_at_, out_at_;
};

}  // namespace

OpPtr make_entries(const pst_op& op, const Maker& maker) {
    switch (op.kind) {
        case PST_WRITE_ENTRIES: return std::make_unique<WriteEntries>(op, maker);
        case PST_CHOOSE_ENTRIES: return std::make_unique<ChooseEntries>(op, maker);
        case PST_ATTEND_ENTRIES: return std::make_unique<AttendEntries>(op, maker);
    }
    throw Misfit("no such operation");
}

}  // namespace pst
