// Rows of several adapters against double precision: low rank, other scales, a difference in codes, and none.
#include <algorithm>
#include <memory>

#include "selftest.h"

namespace pst {

namespace {

struct AdaptTest {
    static constexpr int T = 6, K = 40, N = 70, RANK = 4, PANELS = 2;
    const int32_t of_token[T] = {2, -1, 0, 1, 0, 2};
    const int32_t order[T - 1] = {2, 4, 3, 0, 5};
    Dice dice{77};
    Numbers x = dice.reals(T * K), y = dice.reals(T * N), weights = dice.reals(N * K), more = dice.reals(N * K);
    Numbers a = Numbers(RANK * 64), b = Numbers(PANELS * RANK * PANEL), gain = Numbers(256, 1.25f), shift = dice.reals(256);
    std::vector<std::unique_ptr<Bytes>> memory;

    pst_matrix packed(const Numbers& values) {
        pst_matrix m{};
        m.format = PST_M_BLOCK, m.act = PST_A_F32, m.rows = N, m.cols = K, m.code = PST_C_U8, m.scale = PST_S_F32;
        m.offset = 128, m.factor = 1.0f;
        std::vector<const void*> row_of(PANELS * PANEL, nullptr);
        for (int i = 0; i < N; i++) row_of[size_t(i)] = values.data() + i * K;
        memory.push_back(std::make_unique<Bytes>(PANELS * pst_panel_bytes(&m)));
        m.data = memory.back()->data;
        check(!pst_pack(&m, PST_F32, row_of.data(), 0, PANELS, memory.back()->data), "adapters: packing");
        return m;
    }
    static Numbers unpacked(const pst_matrix& m) {
        Numbers out(PANELS * PANEL * K);
        for (int p = 0; p < PANELS; p++) check(!pst_unpack(&m, p, out.data() + p * PANEL * K), "adapters: unpacking");
        return out;
    }
    double product(const Numbers& w, int n, int t) const {
        double sum = 0;
        for (int k = 0; k < K; k++) sum += double(w[size_t(n * K + k)]) * double(x[size_t(t * K + k)]);
        return sum;
    }
    double low(int n, int t) const {
        double sum = 0;
        for (int r = 0; r < RANK; r++) {
            double u = 0;
            for (int k = 0; k < K; k++) u += double(a[size_t(r * 64 + k)]) * double(x[size_t(t * K + k)]);
            sum += 0.5 * u * double(b[size_t((n / PANEL * RANK + r) * PANEL + n % PANEL)]);
        }
        return sum;
    }

    std::string fault() {
        for (int r = 0; r < RANK; r++)
            for (int k = 0; k < K; k++) a[size_t(r * 64 + k)] = dice.real();
        for (float& v : b) v = dice.real();
        const pst_matrix base = packed(weights), delta = packed(more);
        const Numbers values = unpacked(base), difference = unpacked(delta);
        // Three times the scales of all outputs: three times the products.
        Numbers scales(PANELS * PANEL);
        for (int p = 0; p < PANELS; p++)
            std::memcpy(scales.data() + p * PANEL, static_cast<const uint8_t*>(base.data) + p * pst_panel_bytes(&base), PANEL * 4);
        for (float& s : scales) s *= 3.0f;
        const pst_token_adapters step{of_token, order, T - 1};
        const void* units[] = {a.data(), b.data(), b.data() + RANK * PANEL, gain.data(), shift.data()};
        const pst_adapter lows[] = {{units, PST_F32, RANK, 1, 1, 0.5f}, {}, {}};
        const pst_adapter_codes codes[] = {{}, {scales.data(), nullptr}, {nullptr, &delta}};
        Tiny tiny(T);
        const int32_t in = tiny.add(x), out = tiny.add(y);
        pst_op& first = tiny.op(PST_ADAPT_CODES, in, out, out);
        first.n[0] = N, first.p[0] = &step, first.p[1] = codes, first.p[2] = &base;
        pst_op& second = tiny.op(PST_ADAPT, in, out, out);
        second.n[0] = N, second.n[2] = RANK, second.p[0] = &step, second.p[1] = lows;
        std::string fault = tiny.run("adapters");
        for (int t = 0; t < T && fault.empty(); t++)
            for (int n = 0; n < N && fault.empty(); n++) {
                double expected = double(y[size_t(t * N + n)]);
                if (of_token[t] == 0) expected = expected * 1.25 + double(shift[size_t(n)]) + low(n, t);
                if (of_token[t] == 1) expected = 3 * product(values, n, t);
                if (of_token[t] == 2) expected += product(difference, n, t);
                fault = off("adapters", tiny.buffers[size_t(out)][size_t(t * N + n)], expected, 2e-4);
            }
        return fault;
    }
};

}  // namespace

std::string adapters_fault() { return AdaptTest().fault(); }

}  // namespace pst
