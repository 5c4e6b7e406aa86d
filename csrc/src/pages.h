// What is known of a page's keys, and which pages a token reads for it.
//
// Source: Quest, arXiv 2406.10774. A page's bounds are, component by component, the least and the largest of its keys,
// which no product with a query exceeds: q.k <= sum of max(q_i low_i, q_i high_i).
#pragma once

#include "cache.h"

namespace pst {

// ---- attention_pages.cpp ----

struct PageBounds {
    bool wanted = false;
    pst_plane keys, scales, low, high;

    PageBounds() = default;
    PageBounds(const pst_plane& keys, const pst_plane& scales, const pst_plane& low, const pst_plane& high);
    // Of all pages with slots first ... last-1, the last of which are slot last-1: anew from what they hold. NaN where a
    // key is not finite.
    void update(const Pages& pages, int first, int last, int head) const;
};

// Chooses what one query head's, or several's, token reads of one kv head.
struct PageChoice {
    bool wanted = false;
    pst_pages how;
    pst_plane low, high;
    int per = 0, dim = 0, padded = 0;

    PageChoice() = default;
    PageChoice(const pst_pages& how, const pst_plane& keys, const pst_plane& low, const pst_plane& high, int per);
    // Of tokens that were rehearsed: it only says who chooses, and how many at most.
    explicit PageChoice(const pst_pages& how);
    int64_t bytes() const;
    // Tokens that one with `slots` slots reads at most.
    int most_tokens(int slots) const;
    // The first token of a sequence in the step that chooses its pages; a larger number if none does.
    int first_token(const pst_step& step, int b) const;
    // How many of its pages a token reads that has `slots` slots; itself is in the last.
    int count(int slots, int block_size) const;
    // Their numbers, ascending, for queries [per][dim]: count(slots, ..) of them, fewer than there are. In `memory`.
    const int32_t* choose(const Pages& pages, int slots, int head, const float* queries, uint8_t* memory) const;
};

}  // namespace pst
