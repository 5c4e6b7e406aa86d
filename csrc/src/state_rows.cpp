// States that are rows seen before: PST_CONV, PST_SHIFT.
#include "activation.h"
#include "state.h"

namespace pst {

namespace {

constexpr int BLOCK = 256;  // channels that one thread takes at least
constexpr int MAX_TAPS = 64;
alignas(64) const float ZEROS[BLOCK] = {};

struct Conv final : Op {
    View in, out;
    Slots slots;
    int taps;
    bool silu;
    const float* weight;  // [taps][width]
    const float* bias;

    Conv(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), out(maker.reg(op.out)),
          slots(op, maker, op.n[2], int64_t(op.n[3] - 1) * maker.reg(op.out).width), taps(op.n[3]), silu(op.n[4] != 0),
          weight(static_cast<const float*>(op.p[0])), bias(static_cast<const float*>(op.p[1])) {
        check(taps > 1 && taps <= MAX_TAPS, "a convolution has 2 ... 64 taps");
        check(weight != nullptr, "a convolution has taps");
        check_tokens(maker.reg(op.in[0]), out.width);
        check_tokens(maker.reg(op.out), out.width);
        keeps_state = true;
    }
    void run(Team& team, const Context& context) const override {
        int64_t blocks = (out.width + BLOCK - 1) / BLOCK;
        each_part(team, context.step, blocks, [&](int sequence, const Run& run, int block) {
            int from = block * BLOCK, count = std::min(BLOCK, out.width - from);
            float* past = slots.of(context.step, sequence) + from;
            const float* window[MAX_TAPS];
            for (int k = 0; k + 1 < taps; k++) window[k] = run.fresh ? ZEROS : past + int64_t(k) * out.width;
            for (int64_t t = run.first; t < run.last; t++) {
                window[taps - 1] = in.row(t) + from;
                if (silu) one<true>(window, from, count, out.row(t) + from);
                else one<false>(window, from, count, out.row(t) + from);
                for (int k = 0; k + 1 < taps; k++) window[k] = window[k + 1];
            }
            // In order: what moves inside of the state moves to the front.
            for (int k = 0; k + 1 < taps; k++) {
                float* to = past + int64_t(k) * out.width;
                if (window[k] != to) std::memmove(to, window[k], size_t(count) * sizeof(float));
            }
        });
    }
    template <bool SILU>
    void one(const float* const* window, int from, int count, float* to) const {
        for (int i = 0; i < count; i += LANES) {
            int lanes = std::min(LANES, count - i);
            auto part = [lanes](const float* p) { return lanes == LANES ? load(p) : load(p, lanes); };
            F y = bias ? part(bias + from + i) : all(0.0f);
            for (int k = 0; k < taps; k++)
                y = fma(part(window[k] + i), part(weight + int64_t(k) * out.width + from + i), y);
            if (SILU) y = activate(y, PST_SILU);
            if (lanes == LANES) store(to + i, y);
            else store(to + i, y, lanes);
        }
    }
};

struct Shift final : Op {
    View in, out;
    Slots slots;

    Shift(const pst_op& op, const Maker& maker)
        : in(maker.reg(op.in[0])), out(maker.reg(op.out)), slots(op, maker, op.n[2], maker.reg(op.out).width) {
        check_tokens(maker.reg(op.in[0]), out.width);
        check_tokens(maker.reg(op.out), out.width);
        keeps_state = true;
    }
    void run(Team& team, const Context& context) const override {
        int64_t blocks = (out.width + BLOCK - 1) / BLOCK;
        each_part(team, context.step, blocks, [&](int sequence, const Run& run, int block) {
            int from = block * BLOCK;
            size_t bytes = size_t(std::min(BLOCK, out.width - from)) * sizeof(float);
            float* kept = slots.of(context.step, sequence) + from;
            const float* before = run.fresh ? ZEROS : kept;
            for (int64_t t = run.first; t < run.last; t++) {
                std::memcpy(out.row(t) + from, before, bytes);
                before = in.row(t) + from;
            }
            std::memcpy(kept, before, bytes);
        });
    }
};

}  // namespace

OpPtr make_conv(const pst_op& op, const Maker& maker) { return std::make_unique<Conv>(op, maker); }
OpPtr make_shift(const pst_op& op, const Maker& maker) { return std::make_unique<Shift>(op, maker); }

OpPtr make_state(const pst_op& op, const Maker& maker) {
    switch (op.kind) {
        case PST_CONV: return make_conv(op, maker);
        case PST_SHIFT: return make_shift(op, maker);
        case PST_SCAN:
        case PST_WKV4: return make_channels(op, maker);
        case PST_RG_LRU:
        case PST_DIAGONAL: return make_diagonal(op, maker);
        case PST_MLSTM_GATES: return make_mlstm_gates(op, maker);
        case PST_SCAN2:
        case PST_RECURRENT:
        case PST_WKV6:
        case PST_WKV7:
        case PST_MLSTM:
        case PST_DELTA: return make_heads(op, maker);
    }
    throw Misfit("no such operation");
}

}  // namespace pst
