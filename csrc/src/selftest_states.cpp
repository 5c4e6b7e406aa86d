// The self-test of operations that keep a state: each against its formula in double precision.
#include <functional>

#include "selftest.h"

namespace pst {

namespace {

constexpr int T = 5, H = 2, K = 18, W = 20, C = 21;  // no multiple of the lanes

double softplus(double x) { return std::log1p(std::exp(x)); }

// One operation on random rows of the given widths, with a state in the second page of three.
struct StateTest {
    Tiny tiny{T};
    Dice dice{31};
    std::vector<Numbers> in, fixed;
    std::vector<Bytes*> memory;
    int32_t out;
    pst_op* op;

    StateTest(int32_t kind, std::vector<int> widths, int width, std::vector<std::pair<int, int>> planes,
              std::vector<int32_t> n, std::vector<size_t> weights) {
        std::vector<int32_t> registers;
        for (int w : widths) {
            in.push_back(dice.reals(size_t(T * w)));
            registers.push_back(tiny.add(in.back()));
        }
        out = tiny.add(Numbers(size_t(T * width)));
        op = &tiny.op(kind, registers[0], -1, out);
        for (size_t i = 0; i < registers.size(); i++) op->in[i] = registers[i];
        op->n[0] = op->n[1] = 0;
        for (size_t i = 0; i < n.size(); i++) op->n[i + 2] = n[i];
        for (size_t count : weights) fixed.push_back(dice.reals(count));
        for (size_t i = 0; i < fixed.size(); i++) op->p[i] = fixed[i].data();
        for (auto [heads, dim] : planes) {
            memory.push_back(new Bytes(int64_t(3) * heads * dim * 4));
            tiny.planes.push_back({memory.back()->data, PST_F32, heads, dim, 0, int64_t(heads) * dim, 0, dim});
        }
    }
    ~StateTest() {
        for (Bytes* bytes : memory) delete bytes;
    }
    StateTest(const StateTest&) = delete;
    double x(int number, int t, int column) const {
        return in[size_t(number)][size_t(t) * (in[size_t(number)].size() / T) + size_t(column)];
    }
    double w(int number, int at) const { return fixed[size_t(number)][size_t(at)]; }

    std::string fault(const std::string& name, const std::function<double(int, int)>& expected) {
        int32_t table[] = {1}, shared = 1, blocks = 1;
        const int32_t* tables[] = {table};
        pst_group group{1, 1, tables, &shared, &blocks, nullptr};
        std::string found = tiny.run(name, &group);
        const Numbers& got = tiny.buffers[size_t(out)];
        const int width = int(got.size()) / T;
        for (int i = 0; i < T * width && found.empty(); i++)
            found = off(name, got[size_t(i)], expected(i / width, i % width), 2e-5);
        return found;
    }
};

std::string conv_fault() {
    StateTest test(PST_CONV, {C}, C, {{3, C}}, {0, 4, 1}, {4 * C, C});
    return test.fault("convolution", [&](int t, int c) {
        double y = test.w(1, c);
        for (int k = 0; k < 4; k++)
            if (t - 3 + k >= 0) y += test.w(0, k * C + c) * test.x(0, t - 3 + k, c);
        return y * sigmoid(y);
    });
}

std::string scan_fault() {
    StateTest test(PST_SCAN, {C, C, K, K}, C, {{K, C}}, {0}, {C * K, C});
    for (float& a : test.fixed[0]) a = -std::fabs(a);
    Numbers states(C * K);
    return test.fault("Mamba's scan", [&](int t, int c) {
        double dt = softplus(test.x(1, t, c)), y = test.w(1, c) * test.x(0, t, c);
        for (int n = 0; n < K; n++) {
            float& s = states[size_t(c * K + n)];
            s = float(s * std::exp(dt * test.w(0, c * K + n)) + dt * test.x(0, t, c) * test.x(2, t, n));
            y += double(s) * test.x(3, t, n);
        }
        return y;
    });
}

std::string wkv4_fault() {
    StateTest test(PST_WKV4, {C, C}, C, {{1, C}, {1, C}, {1, C}}, {0, 1, 2}, {C, C});
    for (float& decay : test.fixed[0]) decay = -std::fabs(decay);
    return test.fault("RWKV-4's mean", [&](int t, int c) {
        double num = 0, den = 0;
        for (int s = 0; s <= t; s++) {
            double weight = std::exp(test.x(0, s, c) + (s == t ? test.w(1, c) : (t - s - 1) * test.w(0, c)));
            num += weight * test.x(1, s, c), den += weight;
        }
        return num / den;
    });
}

// S [H][K][W] in double precision: `expected` is asked for every number of a token before the next token.
struct Heads {
    std::vector<double> state = std::vector<double>(size_t(H * K * W));
    double& at(int head, int k, int column) { return state[size_t((head * K + k) * W + column)]; }
};

std::string scan2_fault() {
    StateTest test(PST_SCAN2, {H * W, H, K, K}, H * W, {{H, K * W}}, {0, H, K, W, 1}, {H, H, H});
    for (float& a : test.fixed[0]) a = -std::fabs(a);
    test.op->f[0] = 0.2f, test.op->f[1] = 1.0f;
    Heads heads;
    return test.fault("Mamba-2's scan", [&](int t, int column) {
        int h = column / W;
        double dt = std::min(std::max(softplus(test.x(1, t, h) + test.w(2, h)), double(0.2f)), 1.0);
        double y = test.w(1, h) * test.x(0, t, column);
        for (int k = 0; k < K; k++) {
            double& s = heads.at(h, k, column % W);
            s = s * std::exp(dt * test.w(0, h)) + dt * test.x(0, t, column) * test.x(2, t, k);
            y += s * test.x(3, t, k);
        }
        return y;
    });
}

std::string recurrent_fault() {
    StateTest test(PST_RECURRENT, {H * K, H * K, H * W, H}, H * W, {{H, K * W}}, {0, H, K, W}, {});
    Heads heads;
    return test.fault("gated linear attention", [&](int t, int column) {
        int h = column / W;
        double y = 0;
        for (int k = 0; k < K; k++) {
            double& s = heads.at(h, k, column % W);
            s = s * sigmoid(test.x(3, t, h)) + test.x(1, t, h * K + k) * test.x(2, t, column);
            y += s * test.x(0, t, h * K + k);
        }
        return y;
    });
}

std::string wkv6_fault(bool fixed) {
    StateTest test(PST_WKV6, {H * K, H * K, H * W, H * K}, H * W, {{H, K * W}}, {0, H, K, W}, {H * K, H * K});
    if (!fixed) test.op->p[1] = nullptr;
    Heads heads;
    return test.fault(fixed ? "RWKV-5's sum" : "RWKV-6's sum", [&](int t, int column) {
        int h = column / W;
        double y = 0;
        for (int k = 0; k < K; k++) {
            double& s = heads.at(h, k, column % W);
            int i = h * K + k;
            double add = test.x(1, t, i) * test.x(2, t, column);
            y += (s + test.w(0, i) * add) * test.x(0, t, i);
            s = s * (fixed ? test.w(1, i) : std::exp(-std::exp(test.x(3, t, i)))) + add;
        }
        return y;
    });
}

std::string shared6_fault() {
    StateTest test(PST_WKV6, {H * K, K, W, H * K}, H * W, {{H, K * W}}, {0, H, K, W, 1}, {});
    test.op->f[0] = 0.5f;
    Heads heads;
    return test.fault("RWKV-6's sum of shared keys", [&](int t, int column) {
        int h = column / W;
        double y = 0;
        for (int k = 0; k < K; k++) {
            double &s = heads.at(h, k, column % W), fade = std::exp(-std::exp(test.x(3, t, h * K + k)));
            s = s * fade + test.x(1, t, k) * (1 - fade) * test.x(2, t, column % W);
            y += 0.5 * s * test.x(0, t, h * K + k);
        }
        return y;
    });
}

std::string wkv7_fault() {
    StateTest test(PST_WKV7, {H * K, H * K, H * K, H * W, H * K, H * K}, H * W, {{H, K * W}}, {0, H, K, W}, {});
    Heads heads;
    return test.fault("RWKV-7's delta rule", [&](int t, int column) {
        int h = column / W;
        double found = 0, y = 0;
        for (int k = 0; k < K; k++) found += test.x(4, t, h * K + k) * heads.at(h, k, column % W);
        for (int k = 0; k < K; k++) {
            double& s = heads.at(h, k, column % W);
            int i = h * K + k;
            s = s * std::exp(-std::exp(-0.5) * sigmoid(test.x(1, t, i))) - test.x(4, t, i) * test.x(5, t, i) * found +
                test.x(2, t, i) * test.x(3, t, column);
            y += s * test.x(0, t, i);
        }
        return y;
    });
}

std::string delta_fault(bool by_key, double least = 0) {
    StateTest test(PST_DELTA, {K, K, H * W, by_key ? H * K : H, H}, H * W, {{H, K * W}}, {0, H, K, W, 1}, {H});
    test.fixed[0] = {-0.5f, -2.0f};
    test.op->f[0] = 1e-6f, test.op->f[1] = 1.5f, test.op->f[2] = float(least);
    auto length = [&](int number, int t) {
        double total = 1e-6;
        for (int k = 0; k < K; k++) total += test.x(number, t, k) * test.x(number, t, k);
        return std::sqrt(total);
    };
    Heads heads;
    return test.fault(by_key ? "gated delta rule by key" : "gated delta rule", [&](int t, int column) {
        int h = column / W;
        double found = 0, y = 0, of_q = length(0, t) * std::sqrt(double(K)), of_k = length(1, t);
        for (int k = 0; k < K; k++) {
            double& s = heads.at(h, k, column % W);
            double step = test.x(3, t, by_key ? h * K + k : h), rate = test.w(0, h);
            s *= std::exp(least < 0 ? least * sigmoid(step * rate) : softplus(step) * rate);
            found += s * test.x(1, t, k) / of_k;
        }
        double wrong = (test.x(2, t, column) - found) * 1.5 * sigmoid(test.x(4, t, h));
        for (int k = 0; k < K; k++) {
            double& s = heads.at(h, k, column % W);
            s += wrong * test.x(1, t, k) / of_k;
            y += s * test.x(0, t, k) / of_q;
        }
        return y;
    });
}

std::string rg_lru_fault() {
    StateTest test(PST_RG_LRU, {C, C, C}, C, {{1, C}}, {0}, {C, C, C});
    for (float& a : test.fixed[0]) a = -std::fabs(a);
    std::vector<double> states(C);
    return test.fault("gated linear recurrence", [&](int t, int c) {
        double fade = std::exp(test.w(0, c) * sigmoid(test.x(2, t, c) + test.w(2, c))), &s = states[size_t(c)];
        double given = test.x(0, t, c) * sigmoid(test.x(1, t, c) + test.w(1, c));
        return s = fade * s + given * (t ? std::sqrt(1 - fade * fade) : 1.0);
    });
}

std::string diagonal_fault(bool pairs) {
    constexpr int N = 3;
    const int width = pairs ? 2 * C : C;
    StateTest test(PST_DIAGONAL, {width}, width, {{N, C}, {N, C}}, {0, 1, N, pairs}, {2 * C * N, 2 * C * N, C});
    for (float& a : test.fixed[0]) a *= 0.5f;
    std::vector<double> re(size_t(C * N)), im(size_t(C * N));
    std::vector<double> second(C);
    return test.fault(pairs ? "complex diagonal of pairs" : "complex diagonal", [&](int t, int column) {
        if (column >= C) return second[size_t(column - C)];
        const int c = column;
        double y = pairs ? 0.0 : test.w(2, c) * test.x(0, t, c), &y2 = second[size_t(c)];
        y2 = 0;
        for (int n = 0; n < N; n++) {
            const int at = c * N + n;
            double &r = re[size_t(at)], &m = im[size_t(at)], a = test.w(0, at), b = test.w(0, C * N + at);
            double next = a * r - b * m + test.x(0, t, c);
            m = a * m + b * r + (pairs ? test.x(0, t, C + c) : 0.0);
            r = next;
            y += test.w(1, at) * r - test.w(1, C * N + at) * m;
            y2 += test.w(1, at) * m + test.w(1, C * N + at) * r;
        }
        return y;
    });
}

std::string mlstm_gates_fault() {
    StateTest test(PST_MLSTM_GATES, {H, H, H * K, H * K}, 3 * H, {{H, K}, {H, 1}}, {0, 1, H, K}, {});
    test.op->f[0] = 1e-6f;
    std::vector<double> sums(size_t(H * K)), tops(H), rest(size_t(2 * H));
    return test.fault("mLSTM's gates", [&](int t, int column) {
        if (column >= H) return rest[size_t(column - H)];
        const int h = column;
        double slow = tops[size_t(h)] - softplus(-test.x(1, t, h)), most = std::max(slow, test.x(0, t, h)), found = 0;
        for (int k = 0; k < K; k++) {
            double& s = sums[size_t(h * K + k)];
            s = s * std::exp(slow - most) + std::exp(test.x(0, t, h) - most) * test.x(3, t, h * K + k);
            found += s * test.x(2, t, h * K + k) / std::sqrt(double(K));
        }
        tops[size_t(h)] = most;
        rest[size_t(h)] = std::exp(test.x(0, t, h) - most);
        rest[size_t(H + h)] = 1 / (std::sqrt(double(K)) * (std::max(std::fabs(found), std::exp(-most)) + double(1e-6f)));
        return std::exp(slow - most);
    });
}

std::string mlstm_fault() {
    StateTest test(PST_MLSTM, {H * K, H * K, H * W, 3 * H}, H * W, {{H, K * W}}, {0, H, K, W}, {});
    Heads heads;
    return test.fault("mLSTM", [&](int t, int column) {
        int h = column / W;
        double y = 0;
        for (int k = 0; k < K; k++) {
            double& s = heads.at(h, k, column % W);
            s = s * test.x(3, t, h) + test.x(1, t, h * K + k) * test.x(3, t, H + h) * test.x(2, t, column);
            y += s * test.x(0, t, h * K + k);
        }
        return y * test.x(3, t, 2 * H + h);
    });
}

}  // namespace

std::string states_fault() {
    std::string fault = delta_fault(false);
    if (fault.empty()) fault = delta_fault(true);
    if (fault.empty()) fault = delta_fault(true, -5.0);
    for (bool either : {false, true}) {
        if (fault.empty()) fault = diagonal_fault(either);
        if (fault.empty()) fault = wkv6_fault(either);
    }
    for (auto test : {conv_fault, scan_fault, wkv4_fault, scan2_fault, recurrent_fault, wkv7_fault, shared6_fault, rg_lru_fault,
                      mlstm_gates_fault, mlstm_fault})
        if (fault.empty()) fault = test();
    return fault;
}

}  // namespace pst
