// Streams side by side, rows as large as others and gates of which a share works: against double precision, in place and
// not, and the same bits for every number of threads.
#include <algorithm>
#include <cmath>

#include "tiny_program.h"

namespace {

constexpr int32_t T = 13, THREADS = 5;

struct StreamsProgram : TinyProgram {
    int32_t width, n, active;
    Dice dice{9};
    int32_t x, mixing, correcting, found, mixed, corrected, gate, cut, like, matched, columns;
    Numbers weight;

    StreamsProgram(int32_t width, int32_t n, int32_t active)
        : TinyProgram(T, 1), width(width), n(n), active(active), weight(dice.reals(size_t(width))) {
        x = add(n * width), mixing = add(n * n), correcting = add(n), found = add(width);
        mixed = add(n * width), corrected = add(n * width), gate = add(width), cut = add(width);
        like = add(width), matched = add(width), columns = add(width);
        op(PST_STREAMS, {x, mixing}, mixed, {n, 0});
        op(PST_STREAMS, {mixed, found, correcting}, corrected, {n, 1, active});
        op(PST_CUT_OFF, {gate}, cut, {}, {0.5f});
        op(PST_MATCH, {cut, like}, matched, {}, {1e-5f});
        op(PST_SCALE, {matched}, columns, {}, {}, {weight.data()});
        // In place from here on.
        op(PST_STREAMS, {x, mixing}, x, {n, 0});
        op(PST_STREAMS, {x, found, correcting}, x, {n, 1, active});
        op(PST_CUT_OFF, {gate}, gate, {}, {0.5f});
        op(PST_MATCH, {gate, like}, gate, {}, {1e-5f});
        op(PST_SCALE, {gate}, gate, {}, {}, {weight.data()});
        EXPECT(make(THREADS), "%s", error.c_str());
    }
    void fill(int32_t number, const Numbers& values) {
        std::copy(values.begin(), values.end(), registers[size_t(number)].data);
    }
};

void near(const char* what, const Numbers& got, size_t at, double expected) {
    EXPECT(std::fabs(double(got[at]) - expected) <= 2e-5 * (1 + std::fabs(expected)), "%s %zu: %g, not %g", what, at,
           double(got[at]), expected);
}

void check(const StreamsProgram& p, const Numbers& x, const Numbers& mixing, const Numbers& correcting,
           const Numbers& found, const Numbers& gate, const Numbers& like) {
    const Numbers mixed = p.rows(p.mixed, T), corrected = p.rows(p.corrected, T), cut = p.rows(p.cut, T),
                  matched = p.rows(p.matched, T), columns = p.rows(p.columns, T);
    const size_t w = size_t(p.width), n = size_t(p.n);
    for (size_t t = 0; t < T; t++) {
        std::vector<double> predicted(n * w);
        for (size_t i = 0; i < n; i++)
            for (size_t c = 0; c < w; c++) {
                double sum = x[t * n * w + i * w + c];
                for (size_t j = 0; j < n; j++) sum += double(mixing[t * n * n + i * n + j]) * x[t * n * w + j * w + c];
                predicted[i * w + c] = sum;
                near("mixed", mixed, t * n * w + i * w + c, sum);
            }
        double mean = 0, square = 0, size = 0, wanted = 0;
        for (size_t c = 0; c < w; c++) mean += double(gate[t * w + c]) / double(w);
        for (size_t c = 0; c < w; c++) square += std::pow(gate[t * w + c] - mean, 2) / double(w);
        for (size_t c = 0; c < w; c++) {
            const double news = found[t * w + c] - predicted[size_t(p.active) * w + c];
            for (size_t i = 0; i < n; i++)
                near("corrected", corrected, t * n * w + i * w + c,
                     predicted[i * w + c] + news * (1.0 + correcting[t * n + i]));
            near("cut", cut, t * w + c, std::max(0.0, gate[t * w + c] - mean - 0.5 * std::sqrt(square)));
            size += std::pow(cut[t * w + c], 2) / double(w), wanted += std::pow(like[t * w + c], 2) / double(w);
        }
        for (size_t c = 0; c < w; c++) {
            const double as_large = cut[t * w + c] * std::sqrt(wanted / std::max(size, 1e-5));
            near("matched", matched, t * w + c, as_large);
            near("columns", columns, t * w + c, as_large * p.weight[c]);
        }
    }
}

void streams_of(int32_t width, int32_t n, int32_t active) {
    StreamsProgram p(width, n, active);
    if (!p.program) return;
    const Numbers x = p.dice.reals(size_t(T * n * width)), mixing = p.dice.reals(size_t(T * n * n)),
                  correcting = p.dice.reals(size_t(T * n)), found = p.dice.reals(size_t(T * width)),
                  gate = p.dice.reals(size_t(T * width)), like = p.dice.reals(size_t(T * width));
    int32_t zeros[T] = {}, loc[] = {0, T}, rows[] = {0};
    pst_step step{T, 1, 1, 0, zeros, zeros, loc, rows, nullptr, nullptr, nullptr};
    Numbers first;
    for (int threads = 1; threads <= THREADS; threads++) {
        pst_pool* pool = pst_pool_new(threads, 0, 0);
        p.fill(p.x, x), p.fill(p.mixing, mixing), p.fill(p.correcting, correcting), p.fill(p.found, found);
        p.fill(p.gate, gate), p.fill(p.like, like);
        EXPECT(p.run(pool, step) == 0, "it runs");
        if (first.empty()) check(p, x, mixing, correcting, found, gate, like), first = p.rows(p.corrected, T);
        EXPECT(same(p.rows(p.corrected, T), first), "%d threads, width %d", threads, width);
        EXPECT(same(p.rows(p.x, T), first), "in place, %d streams, width %d", n, width);
        EXPECT(same(p.rows(p.gate, T), p.rows(p.columns, T)), "in place, width %d", width);
        pst_pool_free(pool);
    }
}

void what_is_not_finite_stays() {
    StreamsProgram p(20, 2, 0);
    if (!p.program) return;
    pst_pool* pool = pst_pool_new(1, 0, 0);
    int32_t zeros[T] = {}, loc[] = {0, T}, rows[] = {0};
    pst_step step{T, 1, 1, 0, zeros, zeros, loc, rows, nullptr, nullptr, nullptr};
    Numbers gate(size_t(T * 20), 0.5f);
    gate[3] = NAN;
    p.fill(p.gate, gate), p.fill(p.like, Numbers(size_t(T * 20), 1.0f));
    EXPECT(p.run(pool, step) == 0, "it runs");
    const Numbers cut = p.rows(p.cut, T);
    for (size_t c = 0; c < 20; c++) EXPECT(std::isnan(cut[c]) && cut[20 + c] == 0.0f, "column %zu", c);
    pst_pool_free(pool);
}

void shapes_that_do_not_fit() {
    const char* const expected[] = {"one to eight", "equally wide", "has its weights", "one of the streams"};
    for (int fault = 0; fault < 4; fault++) {
        TinyProgram p(T, 1);
        int32_t x = p.add(fault == 1 ? 31 : 30), weights = p.add(fault == 2 ? 8 : 9), found = p.add(10), c = p.add(3);
        if (fault == 3) p.op(PST_STREAMS, {x, found, c}, x, {3, 1, 3});
        else p.op(PST_STREAMS, {x, weights}, x, {fault == 0 ? 9 : 3, 0});
        EXPECT(!p.make(1) && p.error.find(expected[fault]) != std::string::npos, "%d: %s", fault, p.error.c_str());
    }
}

}  // namespace

void test_streams() {
    for (int32_t width : {1, 17, 300, 4099}) streams_of(width, 4, 0);
    streams_of(21, 3, 1), streams_of(16, 1, 0), streams_of(5, 8, 7);
    what_is_not_finite_stays();
    shapes_that_do_not_fit();
}
