// A choice of tokens and attention over it, against double precision.
#include <algorithm>
#include <cmath>

#include "selftest.h"

namespace pst {

namespace {

// 20 tokens of one sequence choose five of those they see by three heads, and attend to them with two.
struct ChooseTest {
    static constexpr int T = 20, S = 16, K = 5, HEADS = 2, D = 24, INDEX_HEADS = 3, INDEX_D = 18;
    static constexpr float SCALE = 0.25f, INDEX_SCALE = 0.5f;
    Dice dice{77};
    Numbers q = dice.reals(T * HEADS * D), k = dice.reals(T * D), index_q = dice.reals(T * INDEX_HEADS * INDEX_D);
    Numbers index_k = dice.reals(T * INDEX_D), shares = dice.reals(T * INDEX_HEADS);

    std::string fault() {
        Tiny tiny(T);
        Bytes keys(2 * S * D * 4), index(2 * S * INDEX_D * 4);
        tiny.planes.push_back({keys.data, PST_F32, 1, D, 0, S * D, D, D});
        tiny.planes.push_back({index.data, PST_F32, 1, INDEX_D, 0, S * INDEX_D, INDEX_D, INDEX_D});
        const int32_t rk = tiny.add(k), ri = tiny.add(index_k), rq = tiny.add(q), rx = tiny.add(index_q);
        const int32_t rw = tiny.add(shares), chosen = tiny.add(Numbers(T * K)), out = tiny.add(Numbers(T * HEADS * D));
        const int32_t write[] = {0, 0, 1, D, 1, INDEX_D, 0, 1}, choose[] = {0, 0, INDEX_HEADS, INDEX_D, 1, T};
        const int32_t attend[] = {0, 0, HEADS, 1, D, D, 0, 0};
        std::copy(std::begin(write), std::end(write), tiny.op(PST_WRITE, rk, ri, -1).n);
        pst_op& by = tiny.op(PST_CHOOSE, rx, rw, chosen);
        std::copy(std::begin(choose), std::end(choose), by.n);
        by.f[0] = INDEX_SCALE;
        pst_op& op = tiny.op(PST_ATTEND, rq, chosen, out);
        std::copy(std::begin(attend), std::end(attend), op.n);
        op.f[0] = SCALE;
        int32_t table[] = {1, 0}, shared = 1, blocks = 2;
        const int32_t* tables[] = {table};
        pst_group group{1, S, tables, &shared, &blocks, nullptr};
        std::string fault = tiny.run("chosen tokens", &group);
        for (int t = 0; t < T && fault.empty(); t++) {
            const std::vector<int> own = best(t);
            for (int i = 0; i < K && t >= K && fault.empty(); i++)
                fault = off("choice of tokens", tiny.buffers[size_t(chosen)][size_t(t * K + i)], own[size_t(i)], 0);
            for (int i = 0; i < HEADS * D && fault.empty(); i++)
                fault = off("attention over chosen tokens", tiny.buffers[size_t(out)][size_t(t * HEADS * D + i)],
                            expected(t, i / D, i % D, own), 1e-5);
        }
        return fault;
    }
    double dot(const Numbers& a, int row, const Numbers& b, int other, int width) const {
        double sum = 0;
        for (int i = 0; i < width; i++) sum += double(a[size_t(row * width + i)]) * double(b[size_t(other * width + i)]);
        return sum;
    }
    double score(int t, int s) const {
        double sum = 0;
        for (int h = 0; h < INDEX_HEADS; h++)
            sum += double(shares[size_t(t * INDEX_HEADS + h)]) *
                   std::max(0.0, INDEX_SCALE * dot(index_q, t * INDEX_HEADS + h, index_k, s, INDEX_D));
        return sum;
    }
    // Of equal scores, as of those that are 0, the first.
    std::vector<int> best(int t) const {
        std::vector<int> out(size_t(t) + 1);
        for (int s = 0; s <= t; s++) out[size_t(s)] = s;
        std::stable_sort(out.begin(), out.end(), [&](int a, int b) { return score(t, a) > score(t, b); });
        out.resize(std::min(out.size(), size_t(K)));
        std::sort(out.begin(), out.end());
        return out;
    }
    double expected(int t, int head, int component, const std::vector<int>& own) const {
        double total = 0, out = 0;
        for (int s : own) {
            const double weight = std::exp(SCALE * dot(q, t * HEADS + head, k, s, D));
            total += weight, out += weight * double(k[size_t(s * D + component)]);
        }
        return out / total;
    }
};

}  // namespace

std::string choose_fault() { return ChooseTest().fault(); }

}  // namespace pst
