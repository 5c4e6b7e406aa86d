// Which sequences of a step begin with the same pages.
#include "prefixes.h"

#include <algorithm>

namespace pst {

namespace {

// Whole pages that were cached before this step.
int pages_of(const pst_step& step, const pst_group& group, int sequence) {
    return step.positions[step.query_start_loc[sequence]] / group.block_size;
}

bool takes_part(const pst_step& step, const pst_group& group, int sequence) {
    return step.query_start_loc[sequence] < step.query_start_loc[sequence + 1] && group.shared[sequence] == 1 &&
           !(group.dropped && group.dropped[sequence]) && pages_of(step, group, sequence) > 0;
}

}  // namespace

PrefixOrder::PrefixOrder(int max_sequences) : order(size_t(max_sequences)), common(size_t(max_sequences)) {}

Prefixes PrefixOrder::of(const pst_step& step, const pst_group& group) {
    int count = 0;
    for (int b = 0; b < step.num_seqs && count < int(order.size()); b++)
        if (takes_part(step, group, b)) order[size_t(count++)] = b;
    const int32_t* const* tables = group.tables;
    auto first_page = [&](int a, int b) { return tables[a][0] != tables[b][0] ? tables[a][0] < tables[b][0] : a < b; };
    std::sort(order.begin(), order.begin() + count, first_page);
    auto before = [&](int a, int b) {
        int pages = std::min(pages_of(step, group, a), pages_of(step, group, b));
        auto differ = std::mismatch(tables[a], tables[a] + pages, tables[b]);
        if (differ.first != tables[a] + pages) return *differ.first < *differ.second;
        return std::make_pair(pages_of(step, group, a), a) < std::make_pair(pages_of(step, group, b), b);
    };
    bool any = false;
    for (int i = 0, end; i < count; i = end) {
        const int32_t page = tables[order[size_t(i)]][0];
        for (end = i + 1; end < count && tables[order[size_t(end)]][0] == page;) end++;
        std::sort(order.begin() + i, order.begin() + end, before);
        common[size_t(i)] = 0;
        for (int j = i + 1; j < end; j++) {
            int a = order[size_t(j) - 1], b = order[size_t(j)];
            int pages = std::min(pages_of(step, group, a), pages_of(step, group, b));
            common[size_t(j)] = int(std::mismatch(tables[a], tables[a] + pages, tables[b]).first - tables[a]) * group.block_size;
            any = true;
        }
    }
    return any ? Prefixes{count, order.data(), common.data()} : Prefixes{};
}

}  // namespace pst
