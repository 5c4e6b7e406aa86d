// Keys and values of a step's tokens go to their pages, rounded to what the planes hold.
#include "cache.h"
#include "simd.h"

namespace pst {

namespace {

// To the nearest, ties to even; a half that is too large becomes infinity.
void narrow(const float* x, int n, int32_t dtype, uint8_t* out) {
    if (dtype == PST_F32) {
        std::memcpy(out, x, size_t(n) * 4);
        return;
    }
    auto* half = reinterpret_cast<uint16_t*>(out);
    int i = 0;
    if (dtype == PST_F16) {
        for (; i + LANES <= n; i += LANES) store_f16(half + i, load(x + i));
        for (; i < n; i++) half[i] = f32_to_f16(x[i]);
    } else {
        for (; i + LANES <= n; i += LANES) store_bf16(half + i, load(x + i));
        for (; i < n; i++) half[i] = f32_to_bf16(x[i]);
    }
}

struct Source {
    pst_register x;
    pst_plane plane;

    Source(const pst_register& x, const pst_plane& plane, int heads, int dim) : x(x), plane(plane) {
        check_plane(plane, heads, dim);
        check(x.rows == PST_ROWS_TOKENS && int64_t(heads) * dim == x.width, "heads do not fill the register");
    }

    void write(int64_t token, int64_t page, int offset) const {
        const float* row = x.data + token * x.stride;
        int64_t at = page * plane.page_stride + offset * plane.token_stride, bytes = item_bytes(plane.dtype);
        auto* data = static_cast<uint8_t*>(plane.data);
        for (int h = 0; h < plane.heads; h++)
            narrow(row + int64_t(h) * plane.dim, plane.dim, plane.dtype, data + (at + h * plane.head_stride) * bytes);
    }
};

struct Write final : Op {
    std::vector<Source> sources;  // one or two
    int group, layer;

    void run(Team& team, const Context& context) const override {
        const pst_step& step = context.step;
        int64_t count = step.num_tokens, grain = std::max<int64_t>(1, count / (4 * team.size));
        int sequence = 0;
        for (int64_t t, end; team.next(grain, count, t, end);)
            for (; t < end; t++) {
                while (step.query_start_loc[sequence + 1] <= t) sequence++;  // a thread's tokens come in order
                Pages pages(step.groups[group], sequence, layer);
                int position = step.positions[t];
                for (const Source& source : sources)
                    source.write(t, pages.page(position / pages.block_size), position % pages.block_size);
            }
    }
};

}  // namespace

OpPtr make_write(const pst_op& op, const Maker& maker) {
    auto made = std::make_unique<Write>();
    made->group = op.n[0];
    made->layer = op.n[1];
    check(made->layer >= 0, "no such layer");
    made->sources.emplace_back(maker.reg(op.in[0]), maker.plane(op.n[0], op.n[6]), op.n[2], op.n[3]);
    if (op.in[1] >= 0)
        made->sources.emplace_back(maker.reg(op.in[1]), maker.plane(op.n[0], op.n[7]), op.n[4], op.n[5]);
    return made;
}

OpPtr make_cache(const pst_op& op, const Maker& maker) {
    return op.kind == PST_WRITE ? make_write(op, maker) : make_attention(op, maker);
}

}  // namespace pst
