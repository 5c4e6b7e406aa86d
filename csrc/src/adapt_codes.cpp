// PST_ADAPT_CODES: rows whose adapter brings codes: other scales for those of the model, or a matrix that is added.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "pieces.h"
#include "segment.h"
#include "simd.h"

namespace pst {

namespace {

constexpr int MOST_ROWS = 48;  // of one adapter that meet a panel while it is near
constexpr int64_t GRAIN = 4;

// The most that rows and tiles of any matrix that may be added take.
struct Room {
    int64_t row_bytes = 0, tile_rows = 1;

    void add(const pst_matrix& m) {
        const Segment s(m);
        row_bytes = std::max(row_bytes, s.preparation().row_bytes);
        tile_rows = std::max<int64_t>(tile_rows, s.product->tile_rows);
    }
    void add_deltas(int32_t cols) {
        for (int32_t code : {PST_C_U8, PST_C_U4, PST_C_U2})
            for (int32_t group : {0, 32, 64, 128}) {
                pst_matrix m{};
                m.format = PST_M_BLOCK, m.act = PST_A_F32, m.rows = PANEL, m.cols = cols, m.group = group;
                m.code = code, m.scale = PST_S_F16, m.factor = 1.0f;
                add(m);
            }
    }
};

bool has_plain_scales(const pst_matrix& m) {
    return m.format == PST_M_BLOCK && m.code <= PST_C_E4M3 && m.scale <= PST_S_BF16;
}

struct AdaptCodes final : Op {
    View x, y;
    pst_register shape;
    int64_t outputs;
    int32_t half;  // of a pair: 1 its gate, 2 its up; 0: it is none
    const pst_token_adapters* step;
    const pst_adapter_codes* adapters;
    pst_matrix base{};
    BlockShape base_shape{};
    int64_t base_bytes = 0, base_panels = 0, tile_at, panel_at, rows_at;

    AdaptCodes(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), y(maker.reg(op.out)), shape(maker.reg(op.out)), outputs(op.n[0]), half(op.n[1]),
          step(static_cast<const pst_token_adapters*>(op.p[0])),
          adapters(static_cast<const pst_adapter_codes*>(op.p[1])) {
        const pst_register &in = maker.reg(op.in[0]), &product = maker.reg(op.in[1]);
        check(product.data == shape.data && product.stride == shape.stride && product.width == shape.width,
              "adapters work in place on in1");
        check(in.rows == shape.rows, "what is adapted has the rows of its input");
        check(step && adapters, "adapters are two tables");
        check(half >= 0 && half <= 2 && outputs > 0, "n1 is 0, 1 or 2; n0 is a number of outputs");
        check(half ? shape.width >= (outputs + 31) / 32 * PST_PANEL : shape.width == outputs,
              "what is adapted is as wide as the adapters' outputs");
        Room room;
        room.add_deltas(in.width);
        if (op.p[2]) {
            base = *static_cast<const pst_matrix*>(op.p[2]);
            check_segment(base);
            check(base.cols == in.width && has_plain_scales(base), "p2 has codes with a scale each, and the input's columns");
            check(half ? base.pair && base.rows == 2 * outputs : !base.pair && base.rows == outputs,
                  "p2 has the outputs that are adapted");
            block_shape(base, base_shape);
            base_bytes = pst_panel_bytes(&base);
            base_panels = divided(base.rows, PANEL);
            room.add(base);
        }
        tile_at = aligned(int64_t(in.width) * 4);
        panel_at = tile_at + room.tile_rows * PANEL * 4;
        rows_at = panel_at + aligned(base_bytes);
        own_bytes = rows_at + MOST_ROWS * room.row_bytes;
    }

    void run(Team& team, const Context& context) const override {
        if (!step->of_token) return;
        const Walk all{*this, context};
        const int64_t panels = std::max(base_panels, divided(outputs, PANEL)), blocks = all.count_blocks();
        Stretch at;
        for (int64_t first, last; team.next(GRAIN, blocks * panels, first, last);)
            for (int64_t unit = first; unit < last; unit++) {
                if (at.number != unit / panels) {
                    all.go_to(unit / panels, at);
                    at.prepared = false;
                }
                const pst_adapter_codes& own = adapters[at.adapter];
                const int64_t p = unit % panels;
                if (own.scales && p < base_panels) replace(own.scales, at, all, p, context.own_scratch);
                if (own.delta && p < divided(outputs, PANEL)) add(*own.delta, at, all, p, context.own_scratch);
            }
    }

  private:
    // Rows of one adapter beside each other: `first` ... `first + rows - 1` of those that the step lists.
    struct Stretch {
        int64_t number = -1, first = 0;
        int rows = 0;
        int32_t adapter = -1;
        bool prepared = false;
    };

    // The rows of a step by adapter.
    struct Walk {
        const AdaptCodes& op;
        const Context& context;

        bool listed() const { return op.shape.rows == PST_ROWS_TOKENS; }
        int64_t count() const { return listed() ? op.step->count : context.rows(op.shape); }
        int64_t row_at(int64_t i) const { return listed() ? int64_t(op.step->order[i]) : i; }
        int32_t adapter_of(int64_t i) const {
            const int64_t row = row_at(i);
            return op.step->of_token[listed() ? row : context.step.rows[row]];
        }
        bool has_codes(int32_t adapter) const {
            return adapter >= 0 && (op.adapters[adapter].scales || op.adapters[adapter].delta);
        }
        // The next stretch with codes behind `at`; false: there is none.
        bool next(Stretch& at) const {
            int64_t i = at.first + at.rows;
            const int64_t n = count();
            while (i < n && !has_codes(adapter_of(i))) i++;
            if (i >= n) return false;
            at.first = i, at.rows = 0, at.adapter = adapter_of(i), at.number++;
            while (i < n && at.rows < MOST_ROWS && adapter_of(i) == at.adapter) i++, at.rows++;
            return true;
        }
        int64_t count_blocks() const {
            Stretch at;
            while (next(at)) {}
            return at.number + 1;
        }
        void go_to(int64_t number, Stretch& at) const {
            if (at.number > number) at = Stretch{};
            while (at.number < number) next(at);
        }
    };

    Rows prepared(const Segment& segment, Stretch& at, const Walk& all, uint8_t* scratch) const {
        const Preparation how = segment.preparation();
        if (!at.prepared)
            for (int r = 0; r < at.rows; r++)
                how.row(x.row(all.row_at(at.first + r)), x.width, reinterpret_cast<float*>(scratch),
                        scratch + rows_at + r * how.row_bytes);
        at.prepared = true;
        return {scratch + rows_at, how.row_bytes, at.rows};
    }

    // `each(row of y, sums of the panel)` of every row of the stretch.
    template <class Each>
    void multiply(const Segment& segment, const Panel& panel, Stretch& at, const Walk& all, uint8_t* scratch, Each each) const {
        const Rows rows = prepared(segment, at, all, scratch);
        auto* tile = reinterpret_cast<float*>(scratch + tile_at);
        for (int r = 0; r < at.rows; r += segment.product->tile_rows) {
            const int some = std::min(segment.product->tile_rows, at.rows - r);
            segment.product->kernel(rows, r, some, panel, tile);
            for (int i = 0; i < some; i++) each(y.row(all.row_at(at.first + r + i)), tile + i * PANEL);
        }
    }

    // y = x W^T + bias, W being the model's codes with the adapter's scales.
    void replace(const void* scales, Stretch& at, const Walk& all, int64_t p, uint8_t* scratch) const {
        const int lanes = half ? PANEL / 2 : PANEL, first = half == 2 ? PANEL / 2 : 0;
        uint8_t* to = scratch + panel_at;
        std::memcpy(to, static_cast<const uint8_t*>(base.data) + p * base_bytes, size_t(base_bytes));
        const int64_t item = base_shape.scale_bytes / PANEL, group_bytes = item * lanes;
        const int64_t groups = base_shape.group ? divided(base.cols, base_shape.group) : 1;
        const auto* from = static_cast<const uint8_t*>(scales) + p * groups * group_bytes;
        if (!base_shape.group) std::memcpy(to + first * item, from, size_t(group_bytes));
        for (int64_t g = 0; base_shape.group && g < groups; g++) {
            const int64_t each = CHUNK / base_shape.group;
            uint8_t* head = to + base_shape.chunk_at(g / each) + base_shape.super_bytes + base_shape.super_zero_bytes;
            std::memcpy(head + g % each * base_shape.scale_bytes + first * item, from + g * group_bytes, size_t(group_bytes));
        }
        const Segment segment(base);
        Panel panel{to, base.cols};
        panel.block = &base_shape;
        const int columns = int(std::min<int64_t>(lanes, outputs - p * lanes));
        const float* bias = segment.bias(p);
        multiply(segment, panel, at, all, scratch, [&](float* row, const float* sums) {
            float* out = row + p * PANEL + first;
            for (int j = 0; j < columns; j += LANES) {
                F v = load(sums + first + j);
                if (bias) v = v + load(bias + first + j);
                if (columns - j >= LANES) store(out + j, v);
                else store(out + j, v, columns - j);
            }
        });
    }

    // y = y + x D^T
    void add(const pst_matrix& delta, Stretch& at, const Walk& all, int64_t p, uint8_t* scratch) const {
        const Segment segment(delta);
        const Panel panel = segment.panel(p);
        const int columns = int(std::min<int64_t>(PANEL, outputs - p * PANEL));
        const int64_t behind = half == 2 ? PANEL / 2 : 0;
        multiply(segment, panel, at, all, scratch, [&](float* row, const float* sums) {
            for (int j = 0; j < columns; j += LANES) {
                const int64_t n = p * PANEL + j;
                float* out = row + (half ? n / 32 * PANEL + n % 32 + behind : n);
                const int some = std::min(LANES, columns - j);
                if (some == LANES) store(out, load(out) + load(sums + j));
                else store(out, load(out, some) + load(sums + j), some);
            }
        });
    }
};

}  // namespace

OpPtr make_adapt_codes(const pst_op& op, const Maker& maker) { return std::make_unique<AdaptCodes>(op, maker); }

}  // namespace pst
