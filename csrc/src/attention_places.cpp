// What tokens see of their context, and where that lies.
#include "attention.h"

#include <algorithm>

namespace pst {

namespace {

// Key and value of some kv head in their page, and how far it is to the next token's.
struct Place {
    const uint8_t *key, *value, *more = nullptr;
    const float *key_scale = nullptr, *value_scale = nullptr, *more_scale = nullptr;

    Place(const Rule& rule, const Pages& pages, int slot, int head) {
        int64_t page = pages.page(slot / pages.block_size);
        int offset = slot % pages.block_size;
        key = number(rule.stored.plane, page, offset, head);
        value = number(rule.values.plane, page, offset, head);
        if (rule.stored.scaled) key_scale = scale(rule.stored, page, offset, head);
        if (rule.values.scaled) value_scale = scale(rule.values, page, offset, head);
        if (!rule.more.dim) return;
        more = number(rule.more.plane, page, offset, head);
        if (rule.more.scaled) more_scale = scale(rule.more, page, offset, head);
    }
    static const float* scale(const Side& side, int64_t page, int offset, int head) {
        return reinterpret_cast<const float*>(number(side.scales, page, offset, head));
    }
    void put(const Rule& rule, Places& places, int at) const {
        places.keys[at] = key;
        places.values[at] = value;
        if (rule.stored.scaled) places.key_scales[at] = key_scale;
        if (rule.values.scaled) places.value_scales[at] = value_scale;
        if (!rule.more.dim) return;
        places.more[at] = more;
        if (rule.more.scaled) places.more_scales[at] = more_scale;
    }
    void next(const Rule& rule) {
        key += rule.stored.plane.token_stride * item_bytes(rule.stored.plane.dtype);
        value += rule.values.plane.token_stride * item_bytes(rule.values.plane.dtype);
        if (rule.stored.scaled) key_scale += rule.stored.scales.token_stride;
        if (rule.values.scaled) value_scale += rule.values.scales.token_stride;
        if (!rule.more.dim) return;
        more += rule.more.plane.token_stride * item_bytes(rule.more.plane.dtype);
        if (rule.more.scaled) more_scale += rule.more.scales.token_stride;
    }
};

}  // namespace

Block::Block(const pst_step& step, const Rule& rule, int sequence, int first, int count)
    : sequence(sequence), first(first), count(count), span(rule.span), split(false), picks(false),
      positions(step.positions + first), mask(nullptr) {
    int begin = step.query_start_loc[sequence];
    position = positions[0];
    base = end = position + count;
    index = first - begin;
    for (int t = 0; step.mask && t < count && !mask; t++)
        if (step.mask[first + t]) mask = step.mask + first;
    if (mask) {
        base = step.positions[begin];
        position = *std::min_element(positions, positions + count);
        end = *std::max_element(positions, positions + count) + 1;
    }
    reach = rule.first_key(position);
}

Block Block::behind(const Rule& rule, int dropped) const {
    Block out = *this;
    if (!dropped) return out;
    out.shift = dropped;
    out.position -= dropped;
    out.end -= dropped;
    out.base -= dropped;
    out.reach = rule.first_key(out.position);
    return out;
}

void Block::share(const int32_t* last, const int32_t* first) {
    lasts = last, firsts = first;
    blind = firsts[0] > lasts[0];
    position = lasts[0];
    base = end = lasts[count - 1] + 1;
    reach = firsts[0];
}

int Block::active(const Rule& rule, int from, int to, int& t0) const {
    t0 = 0;
    if (mask) return count;
    if (lasts) {
        int t1 = count;
        while (t0 < count && lasts[t0] < from) t0++;
        while (t1 > t0 && firsts[t1 - 1] >= to) t1--;
        return t1;
    }
    t0 = std::max(0, from - position);
    int t1 = count;
    while (t1 > t0 && rule.first_key(position + t1 - 1) >= to) t1--;
    return t1;
}

void find(const Rule& rule, const Pages& pages, const Block& block, int head, int start, Places& places) {
    places.t1 = block.active(rule, start, start + CHUNK, places.t0);
    int first = block.mask ? block.reach : rule.first_key(block.position + places.t0);
    int last = block.mask ? block.base : block.position + places.t1;
    if (block.lasts && places.t0 < places.t1) first = block.firsts[places.t0], last = block.lasts[places.t1 - 1] + 1;
    else if (block.lasts) first = last = start;
    int p = std::max(start, first), end = std::min(start + CHUNK, last);
    places.first = p - start;
    places.last = std::max(p, end) - start;
    find_slots(rule, pages, head, start, p, end, places);
}

void find_slots(const Rule& rule, const Pages& pages, int head, int start, int p, int end, Places& places) {
    auto nothing = [&](int from, int to) {
        std::fill(places.keys + from, places.keys + to, nullptr);
        std::fill(places.values + from, places.values + to, nullptr);
        if (rule.more.dim) std::fill(places.more + from, places.more + to, nullptr);
    };
    nothing(0, p - start);
    nothing(std::max(p, end) - start, CHUNK);
    for (; pages.slots && p < end; p++) Place(rule, pages, pages.slots[p], head).put(rule, places, p - start);
    while (p < end) {
        int next_page = std::min(end, (p / pages.block_size + 1) * pages.block_size);
        for (Place place(rule, pages, p, head); p < next_page; p++, place.next(rule)) place.put(rule, places, p - start);
    }
}

void find_path(const Rule& rule, const Pages& pages, const Block& block, int token, int head, int start, int shared,
               Places& places) {
    int own = block.index + token;
    uint64_t seen = block.mask[token] ? block.mask[token] : ~uint64_t(0) >> (63 - own);
    int from = std::max(block.base - start, 0), at = block.base - start;
    for (; seen && at < CHUNK; seen &= seen - 1, at++)
        if (at >= 0) Place(rule, pages, block.base + __builtin_ctzll(seen), head).put(rule, places, at);
    // The shared keys of the first tile are gathered again. There are none where all are too far back to be seen.
    places.first = shared < from ? std::max(shared, from / TILE * TILE) : from;
    places.last = at;
    for (; at % TILE; at++) places.keys[at] = places.values[at] = places.more[at] = nullptr;
}

}  // namespace pst
