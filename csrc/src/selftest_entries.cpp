// The self-test of residual streams and of entries that several tokens share.
#include <algorithm>

#include "selftest.h"

namespace pst {

namespace {

constexpr int T = 11, N = 3, E = 21, WIDE = (2 + N) * N;  // no multiple of the lanes
constexpr int H = 2, D = 18, M = 3, WINDOW = 4, HALF = 2, TOP = 2, ROWS = 6;  // ROWS: of a page, two entries end in it

std::string connections_fault() {
    Dice dice{41};
    Tiny tiny(T);
    const Numbers x = dice.reals(T * E), raw = dice.reals(T * WIDE), base = dice.reals(WIDE), y = dice.reals(T * E);
    const float scale[] = {0.5f, 1.5f, 2.0f};
    int32_t in = tiny.add(x), weights = tiny.add(raw), more = tiny.add(y), wide = tiny.add(Numbers(T * N * E)),
            out = tiny.add(Numbers(T * E));
    tiny.op(PST_SPREAD, in, -1, wide).n[0] = N;
    pst_op& weigh = tiny.op(PST_WEIGH_STREAMS, weights, -1, weights);
    weigh.n[0] = N, weigh.n[1] = 2, weigh.f[0] = 1e-3f, weigh.p[0] = scale, weigh.p[1] = base.data();
    pst_op& mix = tiny.op(PST_MIX_STREAMS, wide, weights, wide);
    mix.n[0] = N, mix.in[2] = more;
    tiny.op(PST_COLLAPSE_STREAMS, wide, weights, out).n[0] = N;
    std::string fault = tiny.run("residual streams");
    for (int t = 0; t < T && fault.empty(); t++) {
        double read[N], write[N], m[N][N];
        const float* r = raw.data() + t * WIDE;
        for (int i = 0; i < N; i++) {
            read[i] = sigmoid(double(r[i]) * 0.5 + base[size_t(i)]) + 1e-3;
            write[i] = 2 * sigmoid(double(r[N + i]) * 1.5 + base[size_t(N + i)]);
            double total = 0;
            for (int k = 0; k < N; k++) {
                const int at = 2 * N + i * N + k;
                total += m[i][k] = std::exp(double(r[at]) * 2.0 + base[size_t(at)]);
            }
            for (int k = 0; k < N; k++) m[i][k] = m[i][k] / total + 1e-3;
        }
        for (int turn = 0; turn < 3; turn++)
            for (int a = 0; a < N; a++) {
                double total = 1e-3;
                for (int b = 0; b < N; b++) total += turn % 2 ? m[a][b] : m[b][a];
                for (int b = 0; b < N; b++) (turn % 2 ? m[a][b] : m[b][a]) /= total;
            }
        for (int e = 0; e < E && fault.empty(); e++) {
            double expected = 0;
            for (int k = 0; k < N; k++) {
                double stream = write[k] * y[size_t(t * E + e)];
                for (int j = 0; j < N; j++) stream += m[j][k] * x[size_t(t * E + e)];
                expected += read[k] * stream;
            }
            fault = off("residual streams", tiny.buffers[size_t(out)][size_t(t * E + e)], expected, 1e-5);
        }
    }
    return fault;
}

struct EntriesTest {
    Dice dice{43};
    Numbers value = dice.reals(T * 2 * D), score = dice.reals(T * 2 * D), keys = dice.reals(T * D), q = dice.reals(T * H * D),
            weights = dice.reals(T * H), bias = dice.reals(M * 2 * D), norm = dice.reals(D), sinks = dice.reals(H), table;
    std::vector<std::vector<double>> entries;

    EntriesTest() {
        for (double turn : {0.0, 1.5})
            for (int p = 0; p < T; p++)
                for (int i = 0; i < HALF; i++) table.push_back(float(std::cos(0.3 * p * (i + 1) - turn)));
        for (int w = 0; w < T / M; w++) entries.push_back(made(w));
    }
    std::vector<double> made(int w) const {
        std::vector<double> x(D);
        double squares = 0;
        for (int c = 0; c < D; c++) {
            double total = 0, sum = 0;
            for (int t = std::max(0, (w - 1) * M); t < (w + 1) * M; t++) {
                const int at = t >= w * M ? D + c : c;
                const double e = std::exp(double(score[size_t(t * 2 * D + at)]) + bias[size_t(t % M * 2 * D + at)]);
                total += e, sum += e * value[size_t(t * 2 * D + at)];
            }
            x[size_t(c)] = sum / total;
            squares += x[size_t(c)] * x[size_t(c)];
        }
        for (int c = 0; c < D; c++) x[size_t(c)] *= norm[size_t(c)] / std::sqrt(squares / D + 1e-6);
        for (int i = 0; i < HALF; i++) {
            const size_t a = size_t(D - 2 * HALF + 2 * i), p = size_t(w * M * HALF + i);
            const double u = x[a], v = x[a + 1], c = table[p], s = table[p + size_t(T * HALF)];
            x[a] = u * c - v * s, x[a + 1] = v * c + u * s;
        }
        return x;
    }
    double dot(int t, int h, const double* x) const {
        double out = 0;
        for (int i = 0; i < D; i++) out += double(q[size_t((t * H + h) * D + i)]) * x[i];
        return out;
    }

    std::string fault() {
        Tiny tiny(T);
        // Planes: values, scores and keys by token; entries, two rows to a page.
        const int pages = (T + ROWS - 1) / ROWS;
        Bytes waiting(pages * ROWS * 2 * D * 4), scores(pages * ROWS * 2 * D * 4), near(pages * ROWS * D * 4),
            far(pages * 2 * D * 4);
        auto plane = [&](Bytes& bytes, int rows, int dim) {
            tiny.planes.push_back({bytes.data, PST_F32, 1, dim, 0, int64_t(rows) * dim, dim, dim});
        };
        plane(waiting, ROWS, 2 * D), plane(scores, ROWS, 2 * D), plane(near, ROWS, D), plane(far, 2, D);
        int32_t v = tiny.add(value), s = tiny.add(score), k = tiny.add(keys), in = tiny.add(q), w = tiny.add(weights),
                chosen = tiny.add(Numbers(T * TOP)), out = tiny.add(Numbers(T * H * D));
        auto set = [](pst_op& op, std::vector<int32_t> n) { std::copy(n.begin(), n.end(), op.n); };
        set(tiny.op(PST_WRITE, v, s, -1), {0, 0, 1, 2 * D, 1, 2 * D, 0, 1});
        set(tiny.op(PST_WRITE, k, -1, -1), {0, 0, 1, D, 0, 0, 2, 0});
        pst_op& write = tiny.op(PST_WRITE_ENTRIES, -1, -1, -1);
        set(write, {0, 0, 0, 1, 0, 0, 3, M, 1, T, 1, HALF});
        write.f[0] = 1e-6f, write.p[0] = bias.data(), write.p[1] = norm.data(), write.p[2] = table.data();
        pst_op& choose = tiny.op(PST_CHOOSE_ENTRIES, in, w, chosen);
        set(choose, {0, 0, 3, M, H, D, T / M});
        choose.f[0] = 0.3f;
        pst_op& attend = tiny.op(PST_ATTEND_ENTRIES, in, chosen, out);
        set(attend, {0, 0, 2, 0, 0, 3, M, WINDOW, H, D});
        attend.f[0] = 0.25f, attend.p[0] = sinks.data();
        int32_t ids[] = {1, 0}, shared = 1, stride = 2;
        const int32_t* tables[] = {ids};
        pst_group group{1, ROWS, tables, &shared, &stride, nullptr};
        std::string found = tiny.run("entries", &group);
        for (int t = 0; t < T && found.empty(); t++) {
            const std::vector<int> read = choice(t);
            for (size_t i = 0; i < read.size() && found.empty(); i++)
                found = off("a choice of entries", tiny.buffers[size_t(chosen)][size_t(t * TOP) + i], read[i], 0);
            for (int h = 0; h < H && found.empty(); h++) found = attended(t, h, read, tiny.buffers[size_t(out)]);
        }
        return found;
    }
    std::vector<int> choice(int t) const {
        std::vector<std::pair<double, int>> worth;
        for (int e = 0; e < (t + 1) / M; e++) {
            double sum = 0;
            for (int h = 0; h < H; h++)
                sum += double(weights[size_t(t * H + h)]) * std::max(0.0, 0.3f * dot(t, h, entries[size_t(e)].data()));
            worth.push_back({-sum, e});
        }
        std::sort(worth.begin(), worth.end());
        std::vector<int> out;
        for (size_t i = 0; i < worth.size() && i < TOP; i++) out.push_back(worth[i].second);
        std::sort(out.begin(), out.end());
        return out;
    }
    std::string attended(int t, int h, const std::vector<int>& read, const Numbers& got) const {
        std::vector<std::vector<double>> own;
        for (int p = std::max(0, t + 1 - WINDOW); p <= t; p++)
            own.emplace_back(keys.begin() + p * D, keys.begin() + (p + 1) * D);
        for (int e : read) own.push_back(entries[size_t(e)]);
        double total = std::exp(double(sinks[size_t(h)]));
        std::vector<double> sum(D);
        for (const std::vector<double>& k : own) {
            const double e = std::exp(0.25 * dot(t, h, k.data()));
            total += e;
            for (int i = 0; i < D; i++) sum[size_t(i)] += e * k[size_t(i)];
        }
        std::string found;
        for (int i = 0; i < D && found.empty(); i++)
            found = off("attention to entries", got[size_t((t * H + h) * D + i)], sum[size_t(i)] / total, 2e-5);
        return found;
    }
};

}  // namespace

std::string entries_fault() {
    std::string fault = connections_fault();
    return fault.empty() ? EntriesTest().fault() : fault;
}

}  // namespace pst
