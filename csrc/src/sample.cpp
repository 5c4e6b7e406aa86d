// From logits to tokens: health, greedy choice, temperature, min-p, top-k, top-p, the draw, and log-probabilities.
//
// What each step means is penstock.runner.truncate's and penstock.runner.sampler's to say; results are theirs, bit for
// bit. Nothing is sorted but what lies around a boundary: a histogram over the distance from the largest logit finds the
// bin in which top-k or top-p ends, and selection within that bin finds the last token that is kept.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "pool.h"
#include "rounding.h"
#include "weight.h"

namespace pst {

namespace {

constexpr int64_t PIECE = 8192;     // tokens that one thread looks through at a time
constexpr int64_t BLOCK = 1024;     // tokens whose weights are summed up for the draw
constexpr int32_t CHUNK = 128;      // rows that are worked on together
constexpr int32_t BINS = 2048;
constexpr double BINS_PER_UNIT = 47.0;  // 2048 / 47 > 43 doublings: the last bin holds what weighs next to nothing
constexpr double LOG2_E = 0x1.71547652b82fep0;
constexpr double MAX_BIN_SCALE = 1e30;

// A token of the vocabulary: the smaller `rank`, the likelier; equally likely ones by id.
struct Entry {
    uint64_t rank, weight;
    bool operator<(const Entry& other) const { return rank < other.rank; }
};

uint64_t rank_of(float logit, int64_t id) {
    uint32_t bits;
    logit += 0.0f;  // -0 and 0 are equal
    std::memcpy(&bits, &logit, 4);
    uint32_t ascending = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return uint64_t(~ascending) << 32 | uint64_t(id);
}

float logit_of(uint64_t rank) {
    uint32_t ascending = ~uint32_t(rank >> 32);
    uint32_t bits = ascending >> 31 ? ascending ^ 0x80000000u : ~ascending;
    float logit;
    std::memcpy(&logit, &bits, 4);
    return logit;
}

// ---- the largest -----------------------------------------------------------------------------------------------

struct Peak {
    float value;
    int32_t id;
    bool has_nan;
};

Peak find_peak(const float* x, int64_t from, int64_t to) {
    constexpr int N = 32;
    float largest[N];
    uint32_t strange[N] = {};
    std::fill_n(largest, N, -std::numeric_limits<float>::infinity());
    int64_t i = from;
    for (; i + N <= to; i += N)
        for (int j = 0; j < N; j++) {
            float v = x[i + j];
            largest[j] = v > largest[j] ? v : largest[j];
            strange[j] |= v != v ? 1u : 0u;
        }
    for (; i < to; i++) {
        largest[0] = x[i] > largest[0] ? x[i] : largest[0];
        strange[0] |= x[i] != x[i] ? 1u : 0u;
    }
    Peak peak{largest[0], int32_t(from), strange[0] != 0};
    for (int j = 1; j < N; j++) {
        peak.value = largest[j] > peak.value ? largest[j] : peak.value;
        peak.has_nan |= strange[j] != 0;
    }
    return peak;
}

// The first of `count` pieces' peaks that is largest, and where it is in `x`. With a NaN: that there is one.
Peak join_peaks(const float* x, int64_t width, const Peak* peaks, int64_t count) {
    Peak best = peaks[0];
    int64_t piece = 0;
    for (int64_t p = 1; p < count; p++) {
        best.has_nan |= peaks[p].has_nan;
        if (peaks[p].value > best.value) {
            best.value = peaks[p].value;
            piece = p;
        }
    }
    int64_t i = piece * PIECE, end = std::min(i + PIECE, width);
    for (constexpr int N = 32; i + N <= end; i += N) {
        int32_t found = 0;
        for (int j = 0; j < N; j++) found |= x[i + j] == best.value;
        if (found) break;
    }
    while (i < end && x[i] != best.value) i++;
    best.id = int32_t(i < end ? i : 0);
    return best;
}

// ---- what may be drawn -----------------------------------------------------------------------------------------

// Which tokens of a row may be drawn, and with which weights.
struct Choice {
    const float* x;
    double peak, scale;
    uint64_t least;  // weights below are left out (min-p)
    uint64_t last;   // so are tokens of a higher rank (top-k, top-p)
    bool bounded;    // whether `last` says anything
};

// Weights of the BLOCK tokens from `from` on, those that are left out as 0. Returns their sum.
uint64_t weigh_block(const Choice& c, int64_t from, int64_t width, uint64_t* out) {
    float padded[WIDE];
    int64_t to = std::min(from + BLOCK, width);
    float bound = c.bounded ? logit_of(c.last) : 0.0f;
    Whole sums = {}, least = int64_t(c.least) - Whole{};
    uint64_t single = 0;
    for (int64_t i = from; i < to; i += WIDE) {
        const float* x = c.x + i;
        if (i + WIDE > to) {
            std::fill_n(padded, WIDE, -std::numeric_limits<float>::infinity());
            std::copy(x, c.x + to, padded);
            x = padded;
        }
        Whole w = {};
        if (!c.bounded) {
            w = weigh(x, c.peak, c.scale);
            w &= w >= least;
            sums += w;
        } else {
            Floats logits;
            std::memcpy(&logits, x, sizeof logits);
            auto inside = logits >= (bound - Floats{});
            bool any = false;
            for (int j = 0; j < WIDE; j++) any |= inside[j] != 0;
            if (any) {
                w = weigh(x, c.peak, c.scale);
                w &= w >= least;
                for (int j = 0; j < WIDE; j++) {
                    if (!(x[j] >= bound) || rank_of(x[j], i + j) > c.last) w[j] = 0;
                    single += uint64_t(w[j]);
                }
            }
        }
        if (out) std::memcpy(out + (i - from), &w, sizeof w);
    }
    for (int j = 0; j < WIDE; j++) single += uint64_t(sums[j]);
    return single;
}

// ---- histograms ------------------------------------------------------------------------------------------------

struct Bins {
    uint64_t count[BINS], weight[BINS];
};

// How far below the peak, in bins: never less for a smaller logit. `scale` is positive and finite.
inline int32_t bin_of(float logit, float peak, float scale) {
    float distance = (peak - logit) * scale;
    return int32_t(distance < float(BINS - 1) ? distance : float(BINS - 1));
}

float bin_scale(double scale) { return float(std::min(scale * BINS_PER_UNIT, MAX_BIN_SCALE)); }

void fill_bins(const Choice& c, int64_t width, Bins& bins) {
    std::memset(&bins, 0, sizeof bins);
    float padded[WIDE], peak = float(c.peak), scale = bin_scale(c.scale);
    for (int64_t i = 0; i < width; i += WIDE) {
        const float* x = c.x + i;
        int n = int(std::min<int64_t>(WIDE, width - i));
        if (n < WIDE) {
            std::fill_n(padded, WIDE, -std::numeric_limits<float>::infinity());
            std::copy(x, x + n, padded);
            x = padded;
        }
        Whole w = weigh(x, c.peak, c.scale);
        int32_t at[WIDE];
        for (int j = 0; j < WIDE; j++) at[j] = bin_of(x[j], peak, scale);
        for (int j = 0; j < n; j++) {
            if (uint64_t(w[j]) < c.least) continue;
            bins.count[at[j]]++;
            bins.weight[at[j]] += uint64_t(w[j]);
        }
    }
}

// Tokens of bins first ... last, in any order. Returns how many.
int64_t collect(const Choice& c, int64_t width, int32_t first, int32_t last, Entry* out) {
    constexpr int N = 32;
    float peak = float(c.peak), scale = bin_scale(c.scale);
    int64_t count = 0;
    for (int64_t i = 0; i < width; i += N) {
        int n = int(std::min<int64_t>(N, width - i));
        int32_t at[N], any = 0;
        if (n == N) {
            for (int j = 0; j < N; j++) at[j] = bin_of(c.x[i + j], peak, scale);
            for (int j = 0; j < N; j++) any |= at[j] >= first && at[j] <= last;
            if (!any) continue;
        } else {
            for (int j = 0; j < n; j++) at[j] = bin_of(c.x[i + j], peak, scale);
        }
        for (int j = 0; j < n; j++) {
            if (at[j] < first || at[j] > last) continue;
            uint64_t rank = rank_of(c.x[i + j], i + j);
            if (c.bounded && rank > c.last) continue;
            uint64_t weight = weigh_one(c.x[i + j], c.peak, c.scale);
            if (weight >= c.least) out[count++] = {rank, weight};
        }
    }
    return count;
}

// The rank at which the entries, from the likeliest on, first weigh `target` together; the last one's if they never do.
uint64_t rank_of_mass(Entry* entries, int64_t count, uint64_t target) {
    int64_t low = 0, high = count;
    while (high - low > 32) {
        int64_t middle = low + (high - low) / 2;
        std::nth_element(entries + low, entries + middle, entries + high);
        uint64_t mass = 0;
        for (int64_t i = low; i < middle; i++) mass += entries[i].weight;
        if (mass >= target) {
            high = middle;
        } else {
            target -= mass;
            low = middle;
        }
    }
    std::sort(entries + low, entries + high);
    for (; low + 1 < high && entries[low].weight < target; low++) target -= entries[low].weight;
    return entries[low].rank;
}

// Sets the bound of top-k and top-p.
void bound_choice(Choice& c, int64_t width, int32_t top_k, double top_p, Bins& bins, Entry* entries) {
    fill_bins(c, width, bins);
    uint64_t total = 0;
    for (uint64_t weight : bins.weight) total += weight;
    if (top_k > 0) {
        uint64_t before = 0, mass = 0;
        int32_t b = 0;
        for (; b < BINS && before + bins.count[b] < uint64_t(top_k); b++) {
            before += bins.count[b];
            mass += bins.weight[b];
        }
        // Where the rest of a row weighs nothing, nobody can tell whether it was left out.
        if (b < BINS && bins.weight[b]) {
            int64_t count = collect(c, width, b, b, entries), kept = int64_t(uint64_t(top_k) - before);
            std::nth_element(entries, entries + kept - 1, entries + count);
            c.last = entries[kept - 1].rank;
            c.bounded = true;
            for (int64_t i = 0; i < kept; i++) mass += entries[i].weight;
            total = mass;
        }
    }
    if (top_p >= 1.0) return;
    auto target = std::max<uint64_t>(1, uint64_t(std::ceil(top_p * double(total))));
    uint64_t mass = 0;
    int32_t b = 0;
    for (; b < BINS && mass + bins.weight[b] < target; b++) mass += bins.weight[b];
    if (b == BINS) return;  // rounding left all of it below the target
    int64_t count = collect(c, width, b, b, entries);
    c.last = rank_of_mass(entries, count, target - mass);
    c.bounded = true;
}

// ---- random numbers --------------------------------------------------------------------------------------------

// 53 random bits: Philox4x32-10, as penstock.base.rng.
uint64_t random_bits(uint64_t seed, uint32_t sample_index, uint64_t position) {
    uint32_t c0 = uint32_t(position), c1 = sample_index, c2 = 0, c3 = uint32_t(position >> 32);
    auto k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return uint64_t(c0 >> 5) << 26 | c1 >> 6;
}

// The token whose running sum first exceeds the drawn share of `total`.
int32_t draw(const Choice& c, int64_t width, const uint64_t* sums, uint64_t total, uint64_t bits) {
    auto goal = uint64_t((unsigned __int128)(bits) * total >> 53);
    int64_t block = 0;
    for (; sums[block] <= goal; block++) goal -= sums[block];
    alignas(64) uint64_t weights[BLOCK];
    weigh_block(c, block * BLOCK, width, weights);
    int64_t i = 0;
    for (; weights[i] <= goal; i++) goal -= weights[i];
    return int32_t(block * BLOCK + i);
}

struct Own {
    Bins bins;
    std::unique_ptr<Entry[]> entries;
};

}  // namespace

}  // namespace pst

struct pst_sampler {
    int32_t vocab, threads;
    int64_t pieces, blocks;
    std::unique_ptr<pst::Peak[]> peaks;     // [CHUNK][pieces]
    std::unique_ptr<uint64_t[]> sums;       // [CHUNK][blocks]
    std::unique_ptr<pst::Choice[]> choices; // [CHUNK]
    std::unique_ptr<pst::Own[]> own;        // [threads]
};

namespace {

using namespace pst;

struct Job {
    pst_sampler* sampler;
    pst_sample_row* rows;
    int32_t count;
};

void look(Team& team, pst_sampler& s, pst_sample_row* rows, int32_t count) {
    for (int64_t first, last; team.next(1, count * s.pieces, first, last);)
        for (int64_t i = first; i < last; i++) {
            int64_t from = i % s.pieces * PIECE;
            s.peaks[i] = find_peak(rows[i / s.pieces].logits, from, std::min<int64_t>(from + PIECE, s.vocab));
        }
}

void choose(pst_sampler& s, pst_sample_row& row, Choice& c, const Peak* peaks, Own& own) {
    Peak peak = join_peaks(row.logits, s.vocab, peaks, s.pieces);
    row.best = peak.id;
    row.peak = peak.value;
    row.healthy = !peak.has_nan && std::isfinite(peak.value);
    c = {row.logits, peak.value, row.scale, 0, 0, false};
    if (!row.healthy || row.num_tokens <= 0 || row.scale <= 0.0) return;
    if (row.min_p > 0.0) c.least = uint64_t(std::ceil(std::min(row.min_p, 1.0) * double(UNIT)));
    if (row.top_k > 0 || row.top_p < 1.0) bound_choice(c, s.vocab, row.top_k, row.top_p, own.bins, own.entries.get());
}

bool draws(const pst_sample_row& row) { return row.healthy && row.num_tokens > 0 && row.scale > 0.0; }

void run_sample(Team& team, void* argument) {
    PlainRounding rounding;
    Job& job = *static_cast<Job*>(argument);
    pst_sampler& s = *job.sampler;
    for (int32_t at = 0; at < job.count; at += CHUNK) {
        pst_sample_row* rows = job.rows + at;
        int32_t count = std::min(CHUNK, job.count - at);
        look(team, s, rows, count);
        team.barrier();
        for (int64_t first, last; team.next(1, count, first, last);)
            for (int64_t r = first; r < last; r++)
                choose(s, rows[r], s.choices[r], s.peaks.get() + r * s.pieces, s.own[team.id]);
        team.barrier();
        for (int64_t first, last; team.next(4, count * s.blocks, first, last);)
            for (int64_t i = first; i < last; i++) {
                int64_t r = i / s.blocks;
                if (draws(rows[r])) s.sums[i] = weigh_block(s.choices[r], i % s.blocks * BLOCK, s.vocab, nullptr);
            }
        team.barrier();
        for (int64_t first, last; team.next(1, count, first, last);)
            for (int64_t r = first; r < last; r++) {
                pst_sample_row& row = rows[r];
                const uint64_t* sums = s.sums.get() + r * s.blocks;
                uint64_t total = 0;
                if (draws(row)) for (int64_t b = 0; b < s.blocks; b++) total += sums[b];
                for (int32_t j = 0; j < row.num_tokens; j++)
                    row.tokens[j] = total ? draw(s.choices[r], s.vocab, sums, total,
                                                 random_bits(row.seed, uint32_t(row.sample_index + j), row.position))
                                          : row.best;
            }
        team.barrier();
    }
}

struct LogprobJob {
    pst_sampler* sampler;
    pst_logprob_row* rows;
    int32_t count;
};

void log_row(const pst_sampler& s, pst_logprob_row& row, Own& own) {
    const float* x = row.logits;
    Peak peak = find_peak(x, 0, s.vocab);
    Choice c{x, peak.value, LOG2_E, 0, 0, false};
    row.peak = peak.value;
    row.total = 0;
    if (row.num_top <= 0) {
        for (int64_t b = 0; b < s.blocks; b++) row.total += weigh_block(c, b * BLOCK, s.vocab, nullptr);
    } else {
        fill_bins(c, s.vocab, own.bins);
        for (uint64_t weight : own.bins.weight) row.total += weight;
        int32_t b = 0, wanted = std::min(row.num_top, s.vocab);
        for (uint64_t count = own.bins.count[0]; count < uint64_t(wanted);) count += own.bins.count[++b];
        Entry* entries = own.entries.get();
        int64_t count = collect(c, s.vocab, 0, b, entries);
        std::nth_element(entries, entries + wanted - 1, entries + count);
        std::sort(entries, entries + wanted);
        for (int32_t i = 0; i < wanted; i++) row.top_ids[i] = int32_t(uint32_t(entries[i].rank));
    }
    for (int32_t j = 0; j < row.num_tokens; j++) {
        int32_t token = row.tokens[j];
        float value = x[token];
        int32_t above = 0;
        for (int32_t i = 0; i < token; i++) above += x[i] >= value;
        for (int32_t i = token; i < s.vocab; i++) above += x[i] > value;
        row.ranks[j] = above + 1;
    }
}

void run_logprobs(Team& team, void* argument) {
    PlainRounding rounding;
    LogprobJob& job = *static_cast<LogprobJob*>(argument);
    for (int64_t first, last; team.next(1, job.count, first, last);)
        for (int64_t r = first; r < last; r++) log_row(*job.sampler, job.rows[r], job.sampler->own[team.id]);
}

}  // namespace

extern "C" {

pst_sampler* pst_sampler_new(int32_t vocab, int32_t threads) {
    if (vocab < 1 || vocab >= 1 << (63 - UNIT_BITS) || threads < 1) return nullptr;
    try {
        auto s = std::make_unique<pst_sampler>();
        s->vocab = vocab;
        s->threads = threads;
        s->pieces = (vocab + PIECE - 1) / PIECE;
        s->blocks = (vocab + BLOCK - 1) / BLOCK;
        s->peaks = std::make_unique<Peak[]>(size_t(CHUNK * s->pieces));
        s->sums = std::make_unique<uint64_t[]>(size_t(CHUNK * s->blocks));
        s->choices = std::make_unique<Choice[]>(CHUNK);
        s->own = std::make_unique<Own[]>(size_t(threads));
        // Not cleared: most rows touch a few kilobytes of it.
        for (int32_t t = 0; t < threads; t++) s->own[t].entries.reset(new Entry[size_t(vocab)]);
        return s.release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void pst_sampler_free(pst_sampler* sampler) { delete sampler; }

int32_t pst_sample(pst_sampler* sampler, pst_pool* pool, pst_sample_row* rows, int32_t count) {
    if (pool->threads > sampler->threads || count < 0) return -1;
    Job job{sampler, rows, count};
    pool->run(run_sample, &job);
    return 0;
}

int32_t pst_logprobs(pst_sampler* sampler, pst_pool* pool, pst_logprob_row* rows, int32_t count) {
    if (pool->threads > sampler->threads || count < 0) return -1;
    for (int32_t r = 0; r < count; r++)
        for (int32_t j = 0; j < rows[r].num_tokens; j++)
            if (rows[r].tokens[j] < 0 || rows[r].tokens[j] >= sampler->vocab) return -1;
    LogprobJob job{sampler, rows, count};
    pool->run(run_logprobs, &job);
    return 0;
}

}  // extern "C"
