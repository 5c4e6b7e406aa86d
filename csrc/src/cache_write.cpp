// Keys and values of a step's tokens go to their pages, rounded to what the planes hold.
#include <algorithm>

#include "int_lanes.h"
#include "pages.h"
#include "stored.h"

namespace pst {

namespace {

// 8 bits with one scale, which is returned: see pst_plane.
float quantise(const float* x, int n, uint8_t* out) {
    F most = all(0.0f), zero = all(0.0f);
    for (int i = 0; i < n; i += LANES) {
        F v = load(x + i, std::min(LANES, n - i));
        most = max(abs(v), most);        // a NaN is passed over here
        zero = fma(v, all(0.0f), zero);  // and lasts here, as an infinity does
    }
    float scale = (sum(zero) + largest(most)) / 127.0f;
    if (!(scale > 0)) {
        std::memset(out, 0, size_t(n));
        return scale;
    }
    for (int i = 0; i < n; i += LANES) {
        // The quotient is beyond 127 where the scale is so small that it has lost digits.
        F v = load(x + i, std::min(LANES, n - i)) / all(scale);
        v = round(min(max(v, all(-127.0f)), all(127.0f)));
        uint8_t tail[LANES];
        store_s8(i + LANES <= n ? out + i : tail, v);
        if (i + LANES > n) std::memcpy(out + i, tail, size_t(n - i));
    }
    return scale;
}

struct Source {
    pst_register x;
    pst_plane plane, scales;
    int lines;

    Source(const pst_register& x, const pst_plane& plane, const pst_plane& scales, int heads, int dim)
        : x(x), plane(plane), scales(scales), lines(check_plane(plane, heads, dim)) {
        check(x.rows == PST_ROWS_TOKENS && int64_t(heads) * dim == x.width, "heads do not fill the register");
    }

    void write(int64_t token, int line, int64_t page, int offset) const {
        const float* row = x.data + token * x.stride + int64_t(line) * plane.heads * plane.dim;
        for (int h = 0; h < plane.heads; h++, row += plane.dim) keep_row(plane, scales, page, offset, row, h);
    }
};

struct Write final : Op {
    std::vector<Source> sources;  // one or two
    PageBounds bounds;
    int group;
    Lines lines;
    int ranks = 1, rank = 0;  // of the tokens in slots s those with s % ranks == rank; -1 ranks: those of pst_group.held

    void run(Team& team, const Context& context) const override {
        const pst_step& step = context.step;
        int64_t count = step.num_tokens, grain = std::max<int64_t>(1, count / (4 * team.size));
        for (int64_t t, end; team.next(grain, count, t, end);) {
            int sequence = 0;
            for (; t < end; t++) {
                while (step.query_start_loc[sequence + 1] <= t) sequence++;
                for (int i = 0; i < lines.count; i++) {
                    Pages pages(step.groups[group], sequence, lines.of(i));
                    int slot = slot_of(step, sequence, t) - dropped(step.groups[group], sequence, lines.of(i));
                    if (ranks < 0) {
                        const int32_t* held = step.groups[group].held[sequence] + slot / pages.block_size;
                        if (held[1] == held[0]) continue;
                        slot = held[0] * pages.block_size + slot % pages.block_size;
                    } else {
                        if (ranks > 1 && slot % ranks != rank) continue;
                        slot /= ranks;
                    }
                    for (const Source& source : sources)
                        source.write(t, i, pages.page(slot / pages.block_size), slot % pages.block_size);
                }
            }
        }
        if (!bounds.wanted) return;
        team.barrier();
        int heads = bounds.keys.heads * lines.count;
        for (int64_t i, end; team.next(1, int64_t(step.num_seqs) * heads, i, end);)
            for (; i < end; i++) bound(step, int(i / heads), int(i % heads));
    }

    void bound(const pst_step& step, int sequence, int head) const {
        int first = step.query_start_loc[sequence], count = step.query_start_loc[sequence + 1] - first;
        int line = lines.of(head);
        if (!count) return;
        int slot = step.positions[first] - dropped(step.groups[group], sequence, line);
        bounds.update(Pages(step.groups[group], sequence, line), slot, slot + count, lines.in_page(head));
    }
};

}  // namespace

void keep_row(const pst_plane& plane, const pst_plane& scales, int64_t page, int offset, const float* row, int head) {
    uint8_t* to = number(plane, page, offset, head);
    if (plane.dtype != PST_I8) {
        narrow(row, plane.dim, plane.dtype, to);
        return;
    }
    float scale = quantise(row, plane.dim, to);
    std::memcpy(number(scales, page, offset, head), &scale, sizeof scale);
}

OpPtr make_write(const pst_op& op, const Maker& maker) {
    auto made = std::make_unique<Write>();
    made->group = op.n[0];
    made->lines.layer = op.n[1];
    check(made->lines.layer >= 0, "no such layer");
    for (int i = 0; i < (op.in[1] >= 0 ? 2 : 1); i++) {
        const pst_plane& plane = maker.plane(made->group, op.n[6 + i]);
        made->sources.emplace_back(maker.reg(op.in[i]), plane, scales_of(maker, made->group, plane), op.n[2 + 2 * i],
                                   op.n[3 + 2 * i]);
        check(made->sources[0].lines == made->sources.back().lines, "keys and values are not kept alike");
    }
    made->lines.count = made->sources[0].lines;
    if (op.n[10] > 1 || op.n[10] < 0) {
        made->ranks = op.n[10], made->rank = op.n[11];
        check(made->ranks < 0 || (made->rank >= 0 && made->rank < made->ranks), "a rank is one of them");
        if (made->ranks < 0) made->held_group = made->group;
        check(!op.n[8] && !op.n[9], "bounds are of whole pages");
    }
    if (op.n[8] || op.n[9]) {
        const Source& keys = made->sources[0];
        made->bounds = PageBounds(keys.plane, keys.scales, maker.plane(made->group, op.n[8]),
                                  maker.plane(made->group, op.n[9]));
    }
    return made;
}

OpPtr make_cache(const pst_op& op, const Maker& maker) {
    return op.kind == PST_WRITE ? make_write(op, maker) : make_attention(op, maker);
}

}  // namespace pst
