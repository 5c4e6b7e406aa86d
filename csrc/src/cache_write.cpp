// Keys and values of a step's tokens go to their pages, rounded to what the planes hold.
#include "cache.h"
#include "int_lanes.h"
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

    Source(const pst_register& x, const pst_plane& plane, const pst_plane& scales, int heads, int dim)
        : x(x), plane(plane), scales(scales) {
        check_plane(plane, heads, dim);
        check(x.rows == PST_ROWS_TOKENS && int64_t(heads) * dim == x.width, "heads do not fill the register");
    }

    void write(int64_t token, int64_t page, int offset) const {
        const float* row = x.data + token * x.stride;
        for (int h = 0; h < plane.heads; h++, row += plane.dim) {
            uint8_t* to = number(plane, page, offset, h);
            if (plane.dtype != PST_I8) {
                narrow(row, plane.dim, plane.dtype, to);
                continue;
            }
            float scale = quantise(row, plane.dim, to);
            std::memcpy(number(scales, page, offset, h), &scale, sizeof scale);
        }
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
                int slot = slot_of(step, sequence, t);
                for (const Source& source : sources)
                    source.write(t, pages.page(slot / pages.block_size), slot % pages.block_size);
            }
    }
};

}  // namespace

OpPtr make_write(const pst_op& op, const Maker& maker) {
    auto made = std::make_unique<Write>();
    made->group = op.n[0];
    made->layer = op.n[1];
    check(made->layer >= 0, "no such layer");
    for (int i = 0; i < (op.in[1] >= 0 ? 2 : 1); i++) {
        const pst_plane& plane = maker.plane(made->group, op.n[6 + i]);
        made->sources.emplace_back(maker.reg(op.in[i]), plane, scales_of(maker, made->group, plane), op.n[2 + 2 * i],
                                   op.n[3 + 2 * i]);
    }
    return made;
}

OpPtr make_cache(const pst_op& op, const Maker& maker) {
    return op.kind == PST_WRITE ? make_write(op, maker) : make_attention(op, maker);
}

}  // namespace pst
