// Bounds of pages, and the choice by them.
#include "pages.h"

#include <algorithm>
#include <cmath>

#include "stored.h"

namespace pst {

namespace {

constexpr int GROUP = 16;  // pages that are scored together, while the next ones are fetched

// Larger scores are smaller numbers, equal ones in order of their pages; a NaN is larger than all.
inline uint64_t rank_of(float score, int page) {
    score = score == score ? score + 0.0f : HUGE_VALF;
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits >> 31 ? bits : ~(bits | 0x80000000u);
    return uint64_t(bits) << 32 | uint32_t(page);
}

template <int32_t DTYPE>
inline F numbers_at(const uint8_t* row, int at, int n) {
    return n - at < LANES ? load_row(row, DTYPE, at, n) : load_row(row, DTYPE, at, at + LANES);
}

// The first half of each row's numbers becomes their sums with the second.
template <int HALF>
inline void fold(float (&rows)[GROUP][LANES]) {
    for (auto& row : rows)
        for (int i = 0; i < HALF; i++) row[i] += row[i + HALF];
}

// The best of the query heads: sums of max(q low, q high), positive q with the upper bound; one chain per lane. Pages by
// the group, because lanes are added up faster for many of them.
template <int32_t DTYPE>
void score(const PageChoice& of, const Pages& pages, int count, int head, const float* halves, uint64_t* ranks) {
    int row_bytes = of.dim * item_bytes(DTYPE);
    const uint8_t *low[GROUP], *high[GROUP];
    for (int first = 0; first < count; first += GROUP) {
        int some = std::min(GROUP, count - first);
        for (int i = 0; i < some; i++) {
            int64_t page = pages.page(first + i), later = pages.page(std::min(first + i + GROUP, count - 1));
            low[i] = number(of.low, page, 0, head), high[i] = number(of.high, page, 0, head);
            const uint8_t *next_low = number(of.low, later, 0, head), *next_high = number(of.high, later, 0, head);
            for (int at = 0; at < row_bytes; at += 64) {
                __builtin_prefetch(next_low + at);
                __builtin_prefetch(next_high + at);
            }
        }
        float best[GROUP];
        for (float& x : best) x = -HUGE_VALF;
        for (int h = 0; h < of.per; h++) {
            const float *up = halves + int64_t(2) * h * of.padded, *down = up + of.padded;
            alignas(64) float totals[GROUP][LANES] = {};
            for (int i = 0; i < some; i++) {
                F total = all(0.0f);
                for (int at = 0; at < of.padded; at += LANES) {
                    total = fma(load(up + at), numbers_at<DTYPE>(high[i], at, of.dim), total);
                    total = fma(load(down + at), numbers_at<DTYPE>(low[i], at, of.dim), total);
                }
                store(totals[i], total);
            }
            fold<8>(totals), fold<4>(totals), fold<2>(totals), fold<1>(totals);
            for (int i = 0; i < some; i++) {
                float bound = totals[i][0];
                best[i] = bound <= best[i] || best[i] != best[i] ? best[i] : bound;  // a NaN stays
            }
        }
        for (int i = 0; i < some; i++) ranks[first + i] = rank_of(best[i], first + i);
    }
}

}  // namespace

PageBounds::PageBounds(const pst_plane& keys, const pst_plane& scales, const pst_plane& low, const pst_plane& high)
    : wanted(true), keys(keys), scales(scales), low(low), high(high) {
    for (const pst_plane* plane : {&low, &high}) {
        check(plane->heads == keys.heads && plane->dim == keys.dim, "bounds are not shaped like their keys");
        check(plane->dtype == (keys.dtype == PST_I8 ? PST_F32 : keys.dtype), "bounds are not of their keys' type");
    }
}

void PageBounds::update(const Pages& pages, int first, int last, int head) const {
    int size = pages.block_size;
    for (int block = first / size; block * size < last; block++) {
        int64_t page = pages.page(block);
        int count = std::min(size, last - block * size);
        for (int at = 0; at < keys.dim; at += LANES) {
            F least = all(HUGE_VALF), most = all(-HUGE_VALF), zero = all(0.0f);
            for (int i = 0; i < count; i++) {
                F v = load_row(number(keys, page, i, head), keys.dtype, at, keys.dim);
                if (keys.dtype == PST_I8) v = v * all(*reinterpret_cast<float*>(number(scales, page, i, head)));
                least = min(v, least);
                most = max(v, most);
                zero = fma(v, all(0.0f), zero);  // NaN from the first number on that is not finite
            }
            float numbers[LANES];
            int n = std::min(LANES, keys.dim - at);
            store(numbers, least + zero);
            narrow(numbers, n, low.dtype, number(low, page, 0, head) + int64_t(at) * item_bytes(low.dtype));
            store(numbers, most + zero);
            narrow(numbers, n, high.dtype, number(high, page, 0, head) + int64_t(at) * item_bytes(high.dtype));
        }
    }
}

PageChoice::PageChoice(const pst_pages& how, const pst_plane& keys, const pst_plane& low, const pst_plane& high, int per)
    : wanted(true), how(how), low(low), high(high), per(per), dim(keys.dim),
      padded((keys.dim + LANES - 1) / LANES * LANES) {
    check(how.max_tokens > 0 && how.tokens >= 0 && how.recent > 0 && (how.tokens || (how.share > 0 && how.share <= 1)),
          "a budget of pages makes no sense");
    PageBounds(keys, {}, low, high);
}

PageChoice::PageChoice(const pst_pages& how) : wanted(true), how(how), low{}, high{} {
    check(how.max_tokens > 0 && how.max_tokens < 1 << 24 && how.tokens >= 0 && how.recent > 0 &&
              (how.tokens || (how.share > 0 && how.share <= 1)),
          "a budget of tokens makes no sense");
}

int PageChoice::most_tokens(int slots) const {
    double tokens = how.tokens ? how.tokens : std::ceil(how.share * slots - 1e-9);
    return std::min(slots, std::max(int(std::min(tokens, double(slots))), how.recent));
}

// Ranks twice, numbers of pages, and the queries' halves.
int PageChoice::first_token(const pst_step& step, int b) const {
    int first = step.query_start_loc[b], end = step.query_start_loc[b + 1];
    if (!wanted || first == end) return step.num_tokens;
    if (!step.choose_from) return end - first == 1 ? first : step.num_tokens;
    int64_t rest = int64_t(step.choose_from[b]) - step.positions[first];
    return first + int(std::min<int64_t>(std::max<int64_t>(0, rest), end - first));
}

int64_t PageChoice::bytes() const {
    int64_t most = how.max_tokens;
    return 2 * aligned(8 * most) + aligned(4 * most) + aligned(int64_t(8) * per * padded);
}

int PageChoice::count(int slots, int block_size) const {
    int pages = (slots - 1) / block_size + 1;
    if (pages > how.max_tokens) return pages;
    double tokens = how.tokens ? std::min(how.tokens, slots) : std::max(1.0, std::ceil(how.share * slots - 1e-9));
    int recent = pages - std::max(0, slots - how.recent) / block_size;
    return std::min(pages, std::max((int(tokens) - 1) / block_size + 1, recent));
}

const int32_t* PageChoice::choose(const Pages& pages, int slots, int head, const float* queries, uint8_t* memory) const {
    int64_t ranks_bytes = aligned(int64_t(8) * how.max_tokens);
    auto* ranks = reinterpret_cast<uint64_t*>(memory);
    auto* sorted = reinterpret_cast<uint64_t*>(memory + ranks_bytes);
    auto* chosen = reinterpret_cast<int32_t*>(memory + 2 * ranks_bytes);
    auto* halves = reinterpret_cast<float*>(memory + 2 * ranks_bytes + aligned(int64_t(4) * how.max_tokens));
    int all_pages = (slots - 1) / pages.block_size + 1;
    int first_recent = std::max(0, slots - how.recent) / pages.block_size;
    int wanted_pages = count(slots, pages.block_size) - (all_pages - first_recent), at = 0;
    if (wanted_pages > 0) {
        for (int h = 0; h < per; h++)
            for (int i = 0; i < padded; i++) {
                float x = i < dim ? queries[int64_t(h) * dim + i] : 0.0f;
                halves[2 * h * padded + i] = x > 0 ? x : 0.0f;
                halves[(2 * h + 1) * padded + i] = x > 0 ? 0.0f : x;
            }
        auto scoring = low.dtype == PST_F32 ? score<PST_F32> : low.dtype == PST_F16 ? score<PST_F16> : score<PST_BF16>;
        scoring(*this, pages, first_recent, head, halves, ranks);
        std::copy(ranks, ranks + first_recent, sorted);
        std::nth_element(sorted, sorted + wanted_pages - 1, sorted + first_recent);
        uint64_t last = sorted[wanted_pages - 1];
        for (int i = 0; i < first_recent; i++)
            if (ranks[i] <= last) chosen[at++] = int32_t(pages.page(i));
    }
    for (int i = first_recent; i < all_pages; i++) chosen[at++] = int32_t(pages.page(i));
    return chosen;
}

}  // namespace pst
