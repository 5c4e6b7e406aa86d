// The self-test of what is done to streams and sparse gates, against double precision.
#include "selftest.h"

namespace pst {

namespace {

constexpr int T = 2, N = 3, W = 19, ACTIVE = 1;

}  // namespace

std::string streams_fault() {
    Tiny tiny{T};
    Dice dice{77};
    const Numbers x = dice.reals(T * N * W), weights = dice.reals(T * N * N), by = dice.reals(T * N),
                  found = dice.reals(T * W);
    const int32_t in = tiny.add(x), mixing = tiny.add(weights), correcting = tiny.add(by), row = tiny.add(found),
                  streams = tiny.add(Numbers(T * N * W)), cut = tiny.add(Numbers(T * W)),
                  matched = tiny.add(Numbers(T * W));
    tiny.op(PST_STREAMS, in, mixing, streams).n[0] = N;
    pst_op& correct = tiny.op(PST_STREAMS, streams, row, streams);
    correct.in[2] = correcting, correct.n[0] = N, correct.n[1] = 1, correct.n[2] = ACTIVE;
    tiny.op(PST_CUT_OFF, row, -1, cut).f[0] = 0.25f;
    tiny.op(PST_MATCH, cut, row, matched).f[0] = 1e-5f;
    std::string fault = tiny.run("streams");
    for (int t = 0; t < T && fault.empty(); t++) {
        double predicted[N][W], mean = 0, square = 0, size = 0, wanted = 0, rest[W];
        for (int c = 0; c < W; c++) {
            const double own = found[size_t(t * W + c)];
            mean += own / W, wanted += own * own / W;
            for (int i = 0; i < N; i++) {
                predicted[i][c] = x[size_t((t * N + i) * W + c)];
                for (int j = 0; j < N; j++)
                    predicted[i][c] += double(weights[size_t((t * N + i) * N + j)]) * x[size_t((t * N + j) * W + c)];
            }
        }
        for (int c = 0; c < W; c++) square += std::pow(found[size_t(t * W + c)] - mean, 2) / W;
        for (int c = 0; c < W; c++) {
            rest[c] = found[size_t(t * W + c)] - mean - 0.25 * std::sqrt(square);
            if (rest[c] < 0) rest[c] = 0;
            size += rest[c] * rest[c] / W;
        }
        for (int c = 0; c < W && fault.empty(); c++) {
            const double news = found[size_t(t * W + c)] - predicted[ACTIVE][c];
            for (int i = 0; i < N && fault.empty(); i++)
                fault = off("streams", tiny.buffers[size_t(streams)][size_t((t * N + i) * W + c)],
                            predicted[i][c] + news * (1.0 + by[size_t(t * N + i)]), 2e-5);
            if (fault.empty()) fault = off("cut gates", tiny.buffers[size_t(cut)][size_t(t * W + c)], rest[c], 2e-5);
            if (fault.empty())
                fault = off("a matched row", tiny.buffers[size_t(matched)][size_t(t * W + c)],
                            rest[c] * std::sqrt(wanted / size), 2e-5);
        }
    }
    return fault;
}

}  // namespace pst
