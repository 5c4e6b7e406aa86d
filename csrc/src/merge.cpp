// PST_MERGE: what ranks have found over their own tokens becomes the attention of all, each rank's heads on that rank.
//
// A part of a head is (o, m, l): the weighted sum of values against the largest score m, and the sum l of the weights. Two
// parts are one by o = o1 e^(m1 - m) + o2 e^(m2 - m), l alike, with m = max(m1, m2); the result is o / l. In order of ranks
// (DistAttention: Lin et al., Infinite-LLM, arXiv 2401.02669), or pairwise, as a tree does (Tree Attention:
// Shyam et al., arXiv 2408.04093), here by halves of the heads, so that no rank merges what another one needs.
#include "exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "pieces.h"

namespace pst {

namespace {

struct Merge final : Op {
    View in, out;  // `in` is worked on in its place where parts are merged pairwise
    pst_register shape;
    Exchange exchange;
    int heads, dim;  // of a rank; of a value
    int part;        // numbers of a head's part
    int64_t share;   // of a row's parts for a rank
    bool pairwise;
    const float* sinks;

    Merge(const pst_op& op, const Maker& maker, const pst_exchange& e)
        : in(maker.reg(op.in[0])), out(maker.reg(op.out)), shape(maker.reg(op.out)), exchange(e), heads(op.n[0] / e.size),
          dim(op.n[1]), part(dim + 2), share(int64_t(heads) * part), pairwise(op.n[2] != 0),
          sinks(static_cast<const float*>(op.p[1])) {
        check(op.n[0] > 0 && dim > 0 && op.n[0] % e.size == 0, "ranks share out heads evenly");
        check(in.width == e.size * share && out.width == heads * dim, "parts of heads do not fill the register");
        check(maker.reg(op.in[0]).rows == shape.rows, "parts are of the same rows");
        check(!pairwise || (e.size & (e.size - 1)) == 0, "as many ranks as a tree has leaves: a power of two");
        check(share * (e.size - 1) * 4 <= e.slot_bytes, "a slot holds a row's parts at least");
    }

    float* parts_of(int64_t row, int rank) const { return in.row(row) + rank * share; }

    void run(Team& team, const Context& context) const override {
        const int64_t rows = context.rows(shape), most = exchange.slot_bytes / (share * (exchange.size - 1) * 4);
        uint32_t turn = exchange.turn();
        for (int64_t first = 0; first < rows; first += most) {
            const int64_t count = std::min(most, rows - first);
            if (pairwise) by_pairs(team, first, count, turn);
            else in_order(team, first, count, turn);
        }
    }

    // What others need of so many rows is in the slot, parts for `ranks` ranks; and they have given theirs. `merged`: parts of
    // others that this rank adds.
    void exchanged(Team& team, uint32_t turn, int64_t count, int ranks, int merged) const {
        const int64_t bytes = count * share * ranks * 4;
        exchange.meet(team, turn, bytes, bytes, merged);
    }

    // Every rank gives every other its heads, and adds up in order of ranks.
    void in_order(Team& team, int64_t first, int64_t count, uint32_t& turn) const {
        const int own = exchange.rank, size = exchange.size;
        // Of rank r's slot: for each of the others in order, rows of its parts.
        auto place = [&](int giver, int taker) {
            return exchange.slot(turn, giver) + int64_t(taker > giver ? taker - 1 : taker) * count * share;
        };
        for (int r = 0; r < size; r++)
            if (r != own)
                each_run(team, count, share, [&](int64_t row, int64_t from, int64_t to) {
                    std::memcpy(place(own, r) + row * share + from, parts_of(first + row, r) + from, size_t(to - from) * 4);
                });
        exchanged(team, turn, count, size - 1, size - 1);
        each_run(team, count, heads, [&](int64_t row, int64_t from, int64_t to) {
            for (int64_t h = from; h < to; h++) {
                const float* found[PST_MAX_RANKS];
                for (int r = 0; r < size; r++)
                    found[r] = (r == own ? parts_of(first + row, own) : place(r, own) + row * share) + h * part;
                finish(found, size, int(h), out.row(first + row) + h * dim);
            }
        });
        turn++;
    }

    // The ranks that still have parts of the same heads are halved: each gives the other half's heads to its partner there.
    void by_pairs(Team& team, int64_t first, int64_t count, uint32_t& turn) const {
        const int own = exchange.rank;
        for (int half = exchange.size / 2; half; half /= 2, turn++) {
            const int partner = own ^ half, mine = own / half * half, theirs = partner / half * half;
            const int64_t width = half * share;
            float* slot = exchange.slot(turn, own);
            each_run(team, count, width, [&](int64_t row, int64_t from, int64_t to) {
                std::memcpy(slot + row * width + from, parts_of(first + row, theirs) + from, size_t(to - from) * 4);
            });
            exchanged(team, turn, count, half, 1);
            const float* given = exchange.slot(turn, partner);
            each_run(team, count, int64_t(half) * heads, [&](int64_t row, int64_t from, int64_t to) {
                for (int64_t h = from; h < to; h++) {
                    float* here = parts_of(first + row, mine) + h * part;
                    const float* there = given + row * width + h * part;
                    if (own < partner) fold(here, there, here);
                    else fold(there, here, here);
                }
            });
            team.barrier();
        }
        each_run(team, count, heads, [&](int64_t row, int64_t from, int64_t to) {
            for (int64_t h = from; h < to; h++) {
                const float* found = parts_of(first + row, own) + h * part;
                finish(&found, 1, int(h), out.row(first + row) + h * dim);
            }
        });
    }

    static float shrunk(float m, float most) {
        float out[LANES];
        // With nothing but -infinity every weight is 0; -infinity minus itself would be NaN.
        store(out, exp(all(m - (most == NOTHING ? 0.0f : most))));
        return out[0];
    }

    // The earlier part, then the later one, onto `to`, which may be one of them.
    void fold(const float* a, const float* b, float* to) const {
        const float most = b[dim] > a[dim] ? b[dim] : a[dim], by_a = shrunk(a[dim], most), by_b = shrunk(b[dim], most);
        const float total = a[dim + 1] * by_a + b[dim + 1] * by_b;
        map(a, b, to, dim, [&](F x, F y) { return x * all(by_a) + y * all(by_b); });
        to[dim] = most, to[dim + 1] = total;
    }

    // The output of a head of `count` parts.
    void finish(const float* const* parts, int count, int head, float* to) const {
        float most = NOTHING, total = 0.0f, by[PST_MAX_RANKS];
        for (int r = 0; r < count; r++) most = parts[r][dim] > most ? parts[r][dim] : most;
        if (sinks) most = sinks[head] > most ? sinks[head] : most;
        for (int r = 0; r < count; r++) {
            by[r] = shrunk(parts[r][dim], most);
            total += parts[r][dim + 1] * by[r];
        }
        if (sinks) total += shrunk(sinks[head], most);
        for (int i = 0; i < dim; i += LANES) {
            const int n = std::min(LANES, dim - i);
            F sum = all(0.0f);
            for (int r = 0; r < count; r++) sum = sum + load(parts[r] + i, n) * all(by[r]);
            store(to + i, sum / all(total), n);
        }
    }
};

}  // namespace

OpPtr make_merge(const pst_op& op, const Maker& maker) {
    check(op.p[0], "ranks merge through an exchange");
    const auto& exchange = *static_cast<const pst_exchange*>(op.p[0]);
    check_exchange(exchange);
    return std::make_unique<Merge>(op, maker, exchange);
}

}  // namespace pst
