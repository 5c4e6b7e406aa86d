// Sequences that begin with the same pages are a bundle: a task of all their rows of one kv head, for which a chunk that
// several of them share is read and made ready once. So keys and values of a common beginning are read once, those of what
// some of them share behind it once for these, and so on (Hydragen, arXiv 2402.05099; DeFT, arXiv 2404.00242).
#include "attend.h"

#include <algorithm>

namespace pst {

void Attend::attend_bundle(const Context& context, const int32_t* members, int count, int head, const Own& own) const {
    State part = state_at(own.part), whole = state_at(own.whole);
    Places places[2];
    Reach reaches[BLOCK_ROWS];
    Bundle bundle{context, own, members, count, {head, 1}, part, &places[0], &places[1], reaches};
    auto each = [&](auto body) {
        int row = 0;
        for (int i = 0; i < count; row += bundle.block(i++).count * per) body(bundle.block(i), row);
    };
    each([&](const Block& block, int row) {
        take_queries(block, bundle.head, own.behind(row * query_bytes));
        for (int r = row; r < row + block.count * per; r++) reaches[r] = {0, CHUNK, 0.0f, 0.0f};
    });
    int spans = 0;
    each([&](const Block& block, int) { spans = std::max(spans, block.spans()); });
    for (int span = 0; span < spans; span++) {
        each([&](const Block& block, int row) { if (span < block.spans()) part.clear(row, row + block.count * per); });
        attend_members(bundle, 0, count, span * rule.span, span);
        each([&](const Block& block, int row) {
            if (span < block.spans() && spans > 1) fold(block, bundle.head, span, whole.from(row), part.from(row));
        });
    }
    each([&](const Block& block, int row) { put_out(block, bundle.head, (spans > 1 ? whole : part).from(row)); });
}

void Attend::attend_members(Bundle& bundle, int first, int last, int start, int span) const {
    const int end = (span + 1) * rule.span;
    if (last - first == 1) {
        const Block& block = bundle.block(first);
        const int row = bundle.row(first) * per;
        if (first + 1 < bundle.count) fetch(bundle, bundle.block(first + 1), start);
        if (start < std::min(block.end, end))
            attend_chunks(pages_of(bundle.context, block, bundle.head), block, bundle.head, start, span, true, false,
                          bundle.own.behind(row * query_bytes), bundle.part.from(row));
        return;
    }
    bool fresh = true;
    for (; start < end; start += CHUNK, fresh = false) {
        int from = first;
        for (int i = first + 1; i < last; i++)
            if (bundle.block(i).common < start + CHUNK) attend_members(bundle, from, i, start, span), from = i;
        if (from != first) return attend_members(bundle, from, last, start, span);
        attend_shared(bundle, first, last, start, fresh);
    }
}

void Attend::fetch(const Bundle& bundle, const Block& block, int start) const {
    const Pages pages = pages_of(bundle.context, block, bundle.head);
    const int head = in_page(bundle.head.first), end = std::min(block.end, start + CHUNK), size = pages.block_size;
    const int key_bytes = rule.stored.row_bytes(), value_bytes = rule.values.row_bytes();
    for (int p = start; p < end; p++) {
        const int64_t page = pages.page(p / size);
        const uint8_t *key = number(rule.stored.plane, page, p % size, head), *value = number(rule.values.plane, page, p % size, head);
        for (int i = 0; i < key_bytes; i += 64) __builtin_prefetch(key + i, 0, FETCH);
        for (int i = 0; i < value_bytes; i += 64) __builtin_prefetch(value + i, 0, FETCH);
    }
}

void Attend::attend_shared(Bundle& bundle, int first, int last, int start, bool fresh) const {
    const Own& own = bundle.own;
    const Block& block = bundle.block(first);
    const Pages pages = pages_of(bundle.context, block, bundle.head);
    auto look = [&](int at, Places& places) {
        places.first = 0, places.last = CHUNK;
        find_slots(rule, pages, in_page(bundle.head.first), at, at, at + CHUNK, places);
    };
    if (bundle.member == first && bundle.found == start) std::swap(bundle.now, bundle.next);
    else look(start, *bundle.now);
    Ahead ahead = ahead_of(*bundle.next, block, bundle.head);
    if (bundle.block(first + 1).common >= start + 2 * CHUNK) {
        look(start + CHUNK, *bundle.next), ahead.begin(0, CHUNK);
        bundle.member = first, bundle.found = start + CHUNK;
    }
    gather(start, *bundle.now, false, fresh, own, ahead);
    own.keys_read[1] += int64_t(last - first - 1) * CHUNK;
    const int from = bundle.row(first) * per;
    int end = from;
    for (int i = first; i < last; i++) {
        const int rows = bundle.block(i).count * per;
        for (int r = 0; slopes && r < rows; r++) bundle.reaches[end + r] = reach(bundle.block(i), r, bundle.head.first, start);
        end += rows;
    }
    Chunk chunk{own.keys, own.values, own.more, own.factors, own.more_factors, own.value_scales};
    attend_rows(rule, end - from, own.queries + from * query_bytes, query_bytes, bundle.reaches + from, {}, chunk, bundle.part,
                from, own.scratch, ahead);
}

}  // namespace pst
