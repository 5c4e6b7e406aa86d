// PST_ADAPT: what low-rank adapters add to a product, row by row, each row by its own adapter.
#include <algorithm>

#include "ops.h"
#include "pieces.h"
#include "simd.h"

namespace pst {

namespace {

constexpr int ROWS = 4;   // rows of one adapter that read its matrices together
constexpr int CHAINS = 4;  // ranks whose sums run beside each other
constexpr int64_t GRAIN = 16;

// Numbers of one type; UNIT of them are a unit.
struct OfF32 {
    static constexpr int64_t UNIT = PST_UNIT_BYTES / 4;
    static F at(const void* p, int64_t i) { return load(static_cast<const float*>(p) + i); }
};
struct OfF16 {
    static constexpr int64_t UNIT = PST_UNIT_BYTES / 2;
    static F at(const void* p, int64_t i) { return load_f16(static_cast<const uint16_t*>(p) + i); }
};
struct OfBf16 {
    static constexpr int64_t UNIT = PST_UNIT_BYTES / 2;
    static F at(const void* p, int64_t i) { return load_bf16(static_cast<const uint16_t*>(p) + i); }
};

int64_t ceiling(int64_t n, int64_t of) { return (n + of - 1) / of; }

// u [N rows, rank] = factor * (x A^T). Each sum is one chain per lane over the inputs in order, then one tree of lanes.
// Returns the units behind those of A.
template <class Of, int N>
const void* const* down(const float* const* x, int64_t cols, const pst_adapter& a, float* u) {
    constexpr int64_t WIDTH = Of::UNIT / CHAINS;
    const void* const* unit = a.units;
    for (int32_t j = 0; j < a.rank; j += CHAINS) {
        F sums[N][CHAINS];
        for (auto& row : sums)
            for (F& s : row) s = all(0.0f);
        for (int64_t first = 0; first < cols; first += WIDTH) {
            const void* weights = *unit++;
            const int64_t count = std::min(WIDTH, cols - first);
            for (int64_t k = 0; k < count; k += LANES) {
                F w[CHAINS];
                for (int c = 0; c < CHAINS; c++) w[c] = Of::at(weights, c * WIDTH + k);
                for (int r = 0; r < N; r++) {
                    const float* from = x[r] + first + k;
                    const F v = k + LANES <= count ? load(from) : load(from, int(count - k));
                    for (int c = 0; c < CHAINS; c++) sums[r][c] = fma(v, w[c], sums[r][c]);
                }
            }
        }
        for (int r = 0; r < N; r++)
            for (int c = 0; c < CHAINS; c++) u[r * a.rank + j + c] = a.factor * sum(sums[r][c]);
    }
    return unit;
}

// The 16 floats of output `n` on, of a vector in units.
F vector_at(const void* const* units, int64_t n) {
    return load(static_cast<const float*>(units[n / OfF32::UNIT]) + n % OfF32::UNIT);
}

// y = y * gain? + shift? + u B^T, panel by panel; what comes of u is one chain over the ranks in order.
template <class Of, int N, class Place>
void up(const void* const* unit, const float* u, const pst_adapter& a, int64_t outputs, float* const* y, Place place) {
    constexpr int BLOCKS = PST_PANEL / LANES;
    constexpr int32_t RANKS = Of::UNIT / PST_PANEL;
    const void* const* gain = unit + ceiling(outputs, PST_PANEL) * ceiling(a.rank, RANKS);
    const void* const* shift = gain + (a.gain ? ceiling(outputs, OfF32::UNIT) : 0);
    for (int64_t first = 0; first < outputs; first += PST_PANEL) {
        F sums[N][BLOCKS];
        for (auto& row : sums)
            for (F& s : row) s = all(0.0f);
        for (int32_t from = 0; from < a.rank; from += RANKS) {
            const void* weights = *unit++;
            const int32_t count = std::min(RANKS, a.rank - from);
            for (int32_t j = 0; j < count; j++)
                for (int b = 0; b < BLOCKS; b++) {
                    const F w = Of::at(weights, int64_t(j) * PST_PANEL + b * LANES);
                    for (int r = 0; r < N; r++) sums[r][b] = fma(all(u[r * a.rank + from + j]), w, sums[r][b]);
                }
        }
        for (int b = 0; b < BLOCKS; b++) {
            const int64_t n = first + b * LANES;
            if (n >= outputs) break;
            const int some = int(std::min<int64_t>(LANES, outputs - n));
            for (int r = 0; r < N; r++) {
                float* to = y[r] + place(n);
                F v = some == LANES ? load(to) : load(to, some);
                if (a.gain) v = v * vector_at(gain, n);
                if (a.shift) v = v + vector_at(shift, n);
                v = v + sums[r][b];
                if (some == LANES) store(to, v);
                else store(to, v, some);
            }
        }
    }
}

struct Adapt final : Op {
    View x, y;
    pst_register shape;
    int64_t outputs;
    int32_t half;  // of a pair: 1 its gate, 2 its up; 0: it is none
    int32_t most;
    const pst_token_adapters* step;
    const pst_adapter* adapters;

    Adapt(const pst_op& op, const Maker& maker)
        : x(maker.reg(op.in[0])), y(maker.reg(op.out)), shape(maker.reg(op.out)), outputs(op.n[0]), half(op.n[1]),
          most(op.n[2]), step(static_cast<const pst_token_adapters*>(op.p[0])),
          adapters(static_cast<const pst_adapter*>(op.p[1])) {
        const pst_register &in = maker.reg(op.in[0]), &base = maker.reg(op.in[1]);
        check(base.data == shape.data && base.stride == shape.stride && base.width == shape.width,
              "adapters work in place on in1");
        check(in.rows == shape.rows, "what is adapted has the rows of its input");
        check(step && adapters, "adapters are two tables");
        check(half >= 0 && half <= 2 && most >= 0 && outputs > 0, "n1 is 0, 1 or 2; n0 and n2 are numbers of outputs and ranks");
        check(half ? shape.width >= (outputs + 31) / 32 * PST_PANEL : shape.width == outputs,
              "what is adapted is as wide as the adapters' outputs");
        own_bytes = aligned(int64_t(ROWS) * most * 4);
    }

    void run(Team& team, const Context& context) const override {
        if (!step->of_token) return;
        const bool listed = shape.rows == PST_ROWS_TOKENS;
        const int64_t count = listed ? step->count : context.rows(shape);
        auto row_at = [&](int64_t i) { return listed ? int64_t(step->order[i]) : i; };
        auto adapter_of = [&](int64_t row) { return step->of_token[listed ? row : context.step.rows[row]]; };
        auto* u = reinterpret_cast<float*>(context.own_scratch);
        const int64_t grain = std::max<int64_t>(1, std::min<int64_t>(GRAIN, count / (4 * team.size)));
        for (int64_t first, last; team.next(grain, count, first, last);)
            while (first < last) {
                const int32_t own = adapter_of(row_at(first));
                const float* in[ROWS];
                float* out[ROWS];
                int rows = 0;
                for (; first < last && rows < ROWS && adapter_of(row_at(first)) == own; first++, rows++)
                    in[rows] = x.row(row_at(first)), out[rows] = y.row(row_at(first));
                if (own >= 0) apply(adapters[own], in, out, rows, u);
            }
    }

  private:
    void apply(const pst_adapter& a, const float* const* in, float* const* out, int rows, float* u) const {
        if (!a.rank && !a.gain && !a.shift) return;  // it leaves this product as it is
        if (a.dtype == PST_F32) of<OfF32>(a, in, out, rows, u);
        else if (a.dtype == PST_F16) of<OfF16>(a, in, out, rows, u);
        else of<OfBf16>(a, in, out, rows, u);
    }
    template <class Of>
    void of(const pst_adapter& a, const float* const* in, float* const* out, int rows, float* u) const {
        switch (rows) {
            case 1: return placed<Of, 1>(a, in, out, u);
            case 2: return placed<Of, 2>(a, in, out, u);
            case 3: return placed<Of, 3>(a, in, out, u);
            default: return placed<Of, 4>(a, in, out, u);
        }
    }
    template <class Of, int N>
    void placed(const pst_adapter& a, const float* const* in, float* const* out, float* u) const {
        const void* const* behind_a = down<Of, N>(in, x.width, a, u);
        const int64_t behind = half == 2 ? PST_PANEL / 2 : 0;
        if (!half) up<Of, N>(behind_a, u, a, outputs, out, [](int64_t n) { return n; });
        else up<Of, N>(behind_a, u, a, outputs, out, [behind](int64_t n) { return n / 32 * PST_PANEL + n % 32 + behind; });
    }
};

}  // namespace

OpPtr make_adapt(const pst_op& op, const Maker& maker) { return std::make_unique<Adapt>(op, maker); }

}  // namespace pst
