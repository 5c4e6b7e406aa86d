// PST_ATTEND: who computes which part of a step, and how parts of long contexts come together.
//
// A sequence's tokens are cut into blocks; a block and some kv heads are a task, whose rows are the block's tokens
// times the query heads of these kv heads. Tokens of a page lie head beside head, so a task of one token takes as many
// kv heads as leave enough tasks for all threads: memory is read from end to end. Where a task would keep one thread
// busy long after the others are done, its spans become tasks of their own, some waves of them, whose states are folded
// in order of the spans after each wave: the same operations in the same order as one thread does them in.
//
// Nodes of a tree of guesses share the chunks before the step's own keys, and go one by one through those with them.
// A token that reads what was chosen for it (pages, or tokens) is a block by itself.
#include "attend.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pst {

namespace {

int divided(int n, int by) { return (n + by - 1) / by; }

}  // namespace

void Attend::take_queries(const Block& block, Heads some, const Own& own) const {
    uint8_t* to = own.queries;
    const float* queries_of_block = query_row(block);
    for (int g = some.first; g < some.first + some.count; g++)
        for (int r = 0; r < block.count * per; r++, to += query_bytes) {
            const float* token = queries_of_block + r / per * queries.stride;
            if (r % per == 0 && r / per + 2 < block.count)  // tokens lie so far apart that no processor sees them coming
                for (int i = 0; i < per * dim; i += 16) __builtin_prefetch(token + 2 * queries.stride + int64_t(g) * per * dim + i);
            const float* query = token + (int64_t(g) * per + r % per) * dim;
            gather_query(rule.keys, query, to);
            if (rule.more.dim) gather_query(rule.more, query + rule.keys.dim, to + rule.keys.query_bytes());
        }
}

void Attend::attend_span(const Pages& pages, const Block& block, Heads some, int span, bool fresh, bool on, const Own& own,
                 const State& state) const {
    int t0, t1 = block.active(rule, span * rule.span, (span + 1) * rule.span, t0), rows = block.count * per;
    for (int i = 0; i < some.count; i++) state.clear(i * rows + t0 * per, i * rows + t1 * per);
    attend_chunks(pages, block, some, std::max(block.reach / CHUNK * CHUNK, span * rule.span), span, fresh, on, own, state);
}

void Attend::attend_chunks(const Pages& pages, const Block& block, Heads some, int begin, int span, bool fresh, bool on,
                   const Own& own, const State& state) const {
    const int end = std::min(block.end, (span + 1) * rule.span), rows = block.count * per;
    Places head_places, both[2], *now = &both[0], *next = &both[1];
    find(rule, pages, block, in_page(some.first), begin, *now);
    for (int start = begin; start < end; start += CHUNK, std::swap(now, next)) {
        Ahead ahead = ahead_of(*next, block, some);
        if (start + CHUNK < (on ? block.end : end)) {
            find(rule, pages, block, in_page(some.first), start + CHUNK, *next);
            ahead.begin(next->first, next->last);
        }
        if (rule.more.dim && all_in_strips(*now, block, some)) {
            Strips strips = gather(start, *now, true, start == begin && fresh, own, ahead);
            attend_strips(block, some, start, strips, own, state, ahead);
            continue;
        }
        Strips strips;
        for (int i = 0; i < some.count; i++) {
            // Parts of a kv head find what the one before them has made ready; a tree's paths are made ready anew.
            const bool anew = (some.first + i) % parts == 0;
            if (i && anew) find(rule, pages, block, in_page(some.first + i), start, head_places);
            Places& places = i && (anew || some.first / parts != (some.first + i) / parts) ? head_places : *now;
            Part part{some.first + i, start, own.queries + i * rows * query_bytes, state.from(i * rows)};
            bool few = !block.mask && (places.t1 - places.t0) * per <= ROW_GROUP && !rule.more.dim;
            if (!i || anew) strips = gather(start, places, few, start == begin && fresh, own, ahead);
            if (block.mask) attend_tree(pages, block, part, places, own, ahead);
            else attend_tokens(block, part, places.t0, places.t1, strips, own, ahead);
        }
    }
}

Ahead Attend::ahead_of(const Places& next, const Block& block, Heads some) const {
    auto list = [&](const Side& side, const uint8_t* const* rows, const float* const* scales) {
        return Ahead::List{rows, side.scaled ? scales : nullptr, divided(some.count, parts) * side.row_bytes()};
    };
    Ahead ahead{{list(rule.stored, next.keys, next.key_scales),
                 rule.more.dim ? list(rule.more, next.more, next.more_scales)
                               : list(rule.values, next.values, next.value_scales)},
                some.count};
    if (rule.more.dim) {
        const int rows = some.count * block.count * per, lines = (ahead.lists[0].bytes + ahead.lists[1].bytes) / 64 + 2;
        const int work = rows * ((rule.keys.steps() + rule.more.steps()) / Ahead::STEPS + rule.values.padded / 64);
        ahead.lines = divided(lines * CHUNK, std::max(1, work));
    }
    return ahead;
}

Strips Attend::gather(int start, const Places& places, bool few, bool fresh, const Own& own, Ahead& ahead) const {
    *own.keys_read += places.last - places.first;
    const uint8_t* const* keys = rule.rotation.table ? own.rows : places.keys;
    if (rule.rotation.table) turn_keys(rule, places, start, own.turned, own.rows);
    gather_scales(rule.keys, places, places.key_scales, rule.scale, own.factors);
    if (rule.values.scaled) gather_scales(rule.values, places, places.value_scales, 1.0f, own.value_scales);
    if (rule.more.dim) gather_scales(rule.more, places, places.more_scales, rule.scale, own.more_factors);
    if (few) return {&places, keys, own.keys, own.more, fresh};
    gather_keys(rule.keys, keys, places.first, places.last, ahead, own.keys);
    if (rule.more.dim) gather_keys(rule.more, places.more, places.first, places.last, ahead, own.more);
    gather_values(rule.values, places.values, places.first, places.last, ahead, own.values);
    return {};
}

bool Attend::all_in_strips(const Places& places, const Block& block, Heads some) const {
    const bool one_head = some.first / parts == (some.first + some.count - 1) / parts;
    return one_head && !block.mask && places.t1 - places.t0 == block.count &&
           some.count * block.count * per <= STRIP_ROWS;
}

void Attend::attend_strips(const Block& block, Heads some, int start, const Strips& strips, const Own& own, const State& state,
                   Ahead& ahead) const {
    Chunk chunk{nullptr, nullptr, nullptr, own.factors, own.more_factors, own.value_scales};
    Reach reaches[STRIP_ROWS];
    int count = 0;
    for (int i = 0; i < some.count; i++)
        for (int r = 0; r < block.count * per; r++) reaches[count++] = reach(block, r, some.first + i, start);
    attend_rows(rule, count, own.queries, query_bytes, reaches, strips, chunk, state, 0, own.scratch, ahead);
}

void Attend::attend_tokens(const Block& block, const Part& part, int t0, int t1, const Strips& strips, const Own& own,
                   Ahead& ahead) const {
    Chunk chunk{own.keys, own.values, own.more, own.factors, own.more_factors, own.value_scales};
    for (int row = t0 * per, end = t1 * per; row < end; row += ROW_GROUP) {
        int count = std::min(ROW_GROUP, end - row);
        const uint8_t* q = part.queries + row * query_bytes;
        Reach reaches[ROW_GROUP];
        for (int r = 0; r < count; r++) reaches[r] = reach(block, row + r, part.head, part.start);
        attend_rows(rule, count, q, query_bytes, reaches, strips, chunk, part.state, row, own.scratch, ahead);
    }
}

void Attend::attend_tree(const Pages& pages, const Block& block, const Part& part, Places& places, const Own& own,
                 Ahead& ahead) const {
    int end = part.start + CHUNK, shared = places.first;
    for (int t = 0, t1; t < block.count; t = t1) {
        t1 = t + 1;
        if (!block.sees(rule, t, part.start, end)) continue;
        if (end > block.base) {
            find_path(rule, pages, block, t, in_page(part.head), part.start, shared, places);
            gather(part.start, places, false, false, own, ahead);
        } else {
            while (t1 < block.count && block.sees(rule, t1, part.start, end)) t1++;
        }
        attend_tokens(block, part, t, t1, {}, own, ahead);
    }
}

void Attend::fold(const Block& block, Heads some, int span, const State& whole, const State& part) const {
    int t0, t1 = block.active(rule, span * rule.span, (span + 1) * rule.span, t0), rows = block.count * per;
    for (int first = 0; first < some.count * rows; first += rows)
        for (int r = t0 * per; r < t1 * per; r++)
            if (block.sees(rule, r / per, span * rule.span, (span + 1) * rule.span))
                whole.fold(part, first + r, block.first_key(rule, r / per) / rule.span == span);
}

void Attend::put_out(const Block& block, Heads some, const State& whole) const {
    int row = 0;
    for (int g = some.first; g < some.first + some.count; g++)
        for (int r = 0; r < block.count * per; r++, row++) {
            int h = g * per + r % per;
            float* to = out.data + (block.row + r / per) * out.stride;
            if (partial) {
                put_part(&whole, row, to + int64_t(h) * (rule.values.dim + 2));
                continue;
            }
            finish(rule, whole, row, sinks ? sinks + h : nullptr,
                   to + int64_t(h) * rule.values.dim);
        }
}

void Attend::put_part(const State* whole, int row, float* to) const {
    const int width = rule.values.dim;
    if (whole) std::memcpy(to, whole->row(row) + LANES, size_t(width) * 4);
    else std::memset(to, 0, size_t(width) * 4);
    to[width] = whole ? whole->m[row] : NOTHING;
    to[width + 1] = whole ? sum(load(whole->row(row))) : 0.0f;
}

void Attend::put_nothing(const Block& block, Heads some) const {
    for (int t = 0; t < block.count; t++)
        for (int h = some.first * per; h < (some.first + some.count) * per; h++)
            put_part(nullptr, 0, out.data + (block.row + t) * out.stride + int64_t(h) * (rule.values.dim + 2));
}

void Attend::attend_alone(const Pages& pages, const Block& block, Heads some, const Own& own) const {
    State part = state_at(own.part), whole = state_at(own.whole);
    take_queries(block, some, own);
    int first = block.first_span(), last = first + block.spans();
    for (int span = first; span < last; span++) {
        attend_span(pages, block, some, span, span == first, span + 1 < last, own, part);
        if (last - first > 1) fold(block, some, span, whole, part);
    }
    put_out(block, some, last - first > 1 ? whole : part);
}

void Attend::attend_slots(const Context& context, const Block& block, Heads some, const Own& own) const {
    const pst_step& step = context.step;
    const float* from = slots_of.data + block.first * slots_of.stride;
    auto* slots = reinterpret_cast<int32_t*>(own.choice);
    // A node of a tree has a slot of its own behind what was there; others have the number of tokens before them.
    const int kept = dropped(step.groups[group], block.sequence, lines.layer);
    const int last = slot_of(step, block.sequence, block.first) - kept;
    for (int i = 0; i < most; i++) slots[i] = from[i] >= 0 && from[i] <= float(last) ? int32_t(from[i]) : last;
    Pages pages = pages_of(context, block, some);
    pages.slots = slots;
    Block whole = block;
    whole.mask = nullptr;
    attend_alone(pages, whole.behind(rule, block.positions[0] + 1 - most), some, own);
}

void Attend::attend_rehearsed(const Context& context, const Block& block, Heads some, const Own& own) const {
    auto* slots = reinterpret_cast<int32_t*>(own.choice);
    const int words = slots_of.width / kv_heads;
    auto* bits = reinterpret_cast<const uint32_t*>(slots_of.data + block.first * slots_of.stride);
    Pages pages = pages_of(context, block, some);
    pages.slots = slots;
    for (Heads one{some.first, 1}; one.first < some.first + some.count; one.first++) {
        int count = 0;
        for (int i = 0; i <= (block.end - 1) / 32; i++)
            for (uint32_t left = bits[one.first * words + i]; left; left &= left - 1)
                if (int slot = 32 * i + __builtin_ctz(left); slot < block.end) slots[count++] = slot;
        if (!count) slots[count++] = block.end - 1;  // nobody rehearsed: its own key, which it surely sees
        attend_alone(pages, block.behind(rule, block.end - count), one, own);
    }
}

void Attend::attend_chosen(const Context& context, const Block& block, Heads some, const Own& own) const {
    Block whole = kept(context, block, some);
    Pages pages = pages_of(context, block, some);
    int size = pages.block_size, left = (whole.end - 1) / size + 1 - choice.count(whole.end, size);
    if (!left) return attend_alone(pages, whole, some, own);
    for (Heads one{some.first, 1}; one.first < some.first + some.count; one.first++) {
        const float* query = query_row(block) + int64_t(one.first) * per * dim;
        const int32_t* chosen = choice.choose(pages, whole.end, lines.in_page(one.first), query, own.choice);
        attend_alone(Pages(chosen, size), block.behind(rule, whole.shift + left * size), one, own);
    }
}

void Attend::attend_split(Team& team, const Context& context, const Plan& plan, const Own& own) const {
    int64_t parts_of_block = kv_heads / plan.together, pairs = plan.splits * parts_of_block;
    int64_t wave = std::min<int64_t>(slots / pairs, plan.spans);
    uint8_t* parts = context.shared_scratch + pairs_max * state_bytes;
    auto heads_of = [&](int64_t pair) { return Heads{int(pair % parts_of_block) * plan.together, plan.together}; };
    auto block_of = [&](int64_t pair) {
        return kept(context, own.blocks[own.splits[pair / parts_of_block]], heads_of(pair));
    };
    for (int64_t span = 0; span < plan.spans; span += wave) {
        int64_t before = -1;
        for (int64_t i, end; team.next(1, pairs * wave, i, end);)
            for (; i < end; i++) {
                Block block = block_of(i % pairs);
                int64_t nth = span + i / pairs;
                if (nth >= block.spans()) continue;
                Heads some = heads_of(i % pairs);
                take_queries(block, some, own);
                // Its share is in order: where there is one task a span, the next one is the next span's.
                attend_span(pages_of(context, block, some), block, some, int(block.first_span() + nth),
                            pairs > 1 || i != before + 1, pairs == 1 && i + 1 < wave, own,
                            state_at(parts + i * state_bytes));
                before = i;
            }
        team.barrier();
        for (int64_t pair, end; team.next(1, pairs, pair, end);)
            for (; pair < end; pair++) {
                Block block = block_of(pair);
                State whole = state_at(context.shared_scratch + pair * state_bytes);
                for (int64_t nth = span; nth < std::min<int64_t>(span + wave, block.spans()); nth++)
                    fold(block, heads_of(pair), int(block.first_span() + nth), whole,
                         state_at(parts + ((nth - span) * pairs + pair) * state_bytes));
                if (block.spans() > span && block.spans() <= span + wave)
                    put_out(block, heads_of(pair), whole);
            }
        team.barrier();
    }
}

void Attend::run(Team& team, const Context& context) const {
    Own own = own_memory(context);
    Plan made = plan(context.step, context.prefixes[group], team.size, own);
    if (made.splits) attend_split(team, context, made, own);
    int parts = kv_heads / made.together;
    const int64_t whole = int64_t(made.bundles) * kv_heads / team.size, left = int64_t(made.bundles) * kv_heads % team.size;
    // Of a bundle's heads each thread takes as many as the others, and of each that is left a part of its members.
    const int64_t bundles = team.size * (whole + left), tasks = bundles + int64_t(made.blocks) * parts;
    auto bundled = [&](int64_t thread, int64_t nth) {
        const int64_t at = nth < whole ? thread * whole + nth : team.size * whole + nth - whole;
        const int32_t bundle = int32_t(at / kv_heads), from = bundle ? own.ends[bundle - 1] : 0, count = own.ends[bundle] - from;
        auto cut = [&](int64_t part) { return from + int32_t(nth < whole ? part * count : count * (thread + part) / team.size); };
        if (cut(0) < cut(1)) attend_bundle(context, own.members + cut(0), cut(1) - cut(0), int(at % kv_heads), own);
    };
    for (int64_t task, end; team.next(1, tasks, task, end);)
        for (; task < end; task++) {
            if (task < bundles) {
                bundled(task / (whole + left), task % (whole + left));
                continue;
            }
            const int64_t i = task - bundles;
            // Later blocks of a sequence see more: they go first, so that what is left last is short.
            const Block& block = own.blocks[made.blocks - 1 - i / parts];
            Heads some{int(i % parts) * made.together, made.together};
            if (block.blind) put_nothing(block, some);
            else if (block.picks && most) attend_slots(context, block, some, own);
            else if (block.picks && rehearsed) attend_rehearsed(context, block, some, own);
            else if (block.picks) attend_chosen(context, block, some, own);
            else if (!block.split && !block.bundled)
                attend_alone(pages_of(context, block, some), kept(context, block, some), some, own);
        }
}

OpPtr make_attention(const pst_op& op, const Maker& maker) {
    auto made = std::make_unique<Attend>();
    made->queries = maker.reg(op.in[0]);
    made->out = maker.reg(op.out);
    made->group = op.n[0];
    made->lines.layer = op.n[1];
    made->heads = op.n[2];
    made->kv_heads = op.n[3];
    made->dim = op.n[4];
    int width = op.n[5];
    const int behind = op.n[11];  // numbers of a key in its second plane
    check(op.n[1] >= 0 && op.n[8] >= 0 && op.n[9] >= 0, "a layer, window or chunk is negative");
    check(behind >= 0 && behind < made->dim, "a second plane of keys has some of their numbers");
    check(made->kv_heads > 0 && made->heads > 0 && made->heads % made->kv_heads == 0, "kv heads do not divide heads");
    const pst_plane &keys = maker.plane(op.n[0], op.n[6]), &values = maker.plane(op.n[0], op.n[7]);
    made->lines.count = check_plane(keys, made->kv_heads, made->dim - behind);
    check(check_plane(values, made->kv_heads, width) == made->lines.count, "keys and values are not kept alike");
    check(made->queries.rows == PST_ROWS_TOKENS || made->queries.rows == made->out.rows, "queries of all that is wanted");
    check(int64_t(made->heads) * made->dim == made->queries.width, "query heads do not fill the register");
    made->partial = op.kind == PST_ATTEND_PART;
    if (made->partial) {
        check(op.p[1] && !op.p[2] && !op.p[3] && op.in[1] < 0 && op.in[2] < 0, "parts of heads are of plain attention");
        const int32_t* share = static_cast<const int32_t*>(op.p[1]);
        made->ranks = share[0], made->rank = share[1];
        check(made->ranks < 0 || (made->rank >= 0 && made->rank < made->ranks), "a rank is one of them");
        check(made->ranks > 0 || !op.p[0], "slopes need to know how far keys are apart, and blocks lie anywhere");
        if (made->ranks < 0) made->held_group = made->group;
        else made->rule.step = float(made->ranks);
        made->keeps_state = true;  // a tree's slots are no positions
    }
    check(int64_t(made->heads) * (width + 2 * made->partial) == made->out.width, "heads of values do not fill the register");
    made->per = made->heads / made->kv_heads;
    made->rule.keys = made->rule.stored = Side(keys, scales_of(maker, made->group, keys), made->dim - behind, 2 * LANES);
    made->rule.span = SPAN;
    if (behind) {
        const pst_plane& more = maker.plane(op.n[0], op.n[10]);
        check(check_plane(more, made->kv_heads, behind) == made->lines.count, "both planes of keys are kept alike");
        check(op.n[6] == op.n[7] && !op.p[2] && !op.p[3], "keys of two planes have the first for values, and no more");
        made->rule.more = Side(more, scales_of(maker, made->group, more), behind, 2 * LANES);
        made->rule.span = NARROW_SPAN;
        if (made->lines.count == 1) {
            while (made->per % (2 * ROW_GROUP * made->parts) == 0) made->parts *= 2;
            made->per /= made->parts, made->kv_heads *= made->parts;
        }
    }
    check(!made->partial || made->lines.count == 1, "heads with lines of their own share out no tokens");
    made->rule.rotation = {};
    if (op.p[2]) {
        const pst_rotation& r = made->rule.rotation = *static_cast<const pst_rotation*>(op.p[2]);
        check(r.table && r.positions > 0, "a rotation needs its table");
        check(r.first >= 0 && r.half > 0 && r.first + 2 * r.half <= made->dim, "a key is smaller than what turns");
        pst_plane turned = keys;
        turned.dtype = PST_F32;
        made->rule.keys = Side(turned, {}, made->dim, LANES);
    }
    made->rule.values = Side(values, scales_of(maker, made->group, values), width, LANES);
    made->rule.scale = op.f[0];
    made->rule.soft_cap = op.f[1];
    made->rule.window = op.n[8];
    made->rule.chunk = op.n[9];
    if (op.p[3] && op.in[2] >= 0) {
        made->choice = PageChoice(*static_cast<const pst_pages*>(op.p[3]));
        made->rehearsed = true;
        made->slots_of = maker.reg(op.in[2]);
        check(!op.n[8] && !op.n[9] && !op.p[0] && !op.p[2] && op.in[1] < 0 && !behind && made->lines.count == 1,
              "rehearsed tokens go without window, chunk, slopes, rotation, lines and other choices");
        check(made->slots_of.rows == PST_ROWS_TOKENS && made->parts == 1 &&
                  made->slots_of.width == made->kv_heads * ((made->choice.how.max_tokens + 31) / 32),
              "what was rehearsed has a bit for every token");
    } else if (op.p[3]) {
        const pst_pages& how = *static_cast<const pst_pages*>(op.p[3]);
        check(!op.n[8] && !op.n[9] && !op.p[0] && !op.p[2], "chosen pages go without window, chunk, slopes and rotation");
        const pst_plane &low = maker.plane(op.n[0], how.low), &high = maker.plane(op.n[0], how.high);
        made->choice = PageChoice(how, keys, low, high, made->per);
    }
    if (op.in[1] >= 0) {
        made->slots_of = maker.reg(op.in[1]);
        made->most = made->slots_of.width;
        check(made->slots_of.rows == PST_ROWS_TOKENS, "what tokens chose is by tokens");
        check(!op.n[8] && !op.n[9] && !op.p[0] && !op.p[2] && !op.p[3],
              "chosen tokens go without window, chunk, slopes, rotation and chosen pages");
        check(made->lines.count == 1, "heads with lines of their own choose no tokens");
    }
    made->slopes = static_cast<const float*>(op.p[0]);
    made->sinks = made->partial ? nullptr : static_cast<const float*>(op.p[1]);
    // Keys of two planes are shared by so many heads that others beside them save nothing.
    if (made->lines.count == 1 && !made->rule.window && !made->rule.chunk && !made->choice.wanted && !made->rehearsed &&
        !made->most && !behind && !made->partial)
        made->shares_group = made->group;
    made->lay_out(maker);
    return made;
}

}  // namespace pst
