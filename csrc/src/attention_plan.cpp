// How a step of PST_ATTEND is cut into tasks, and where a thread keeps what it works on.
#include "attend.h"

#include <algorithm>

namespace pst {

namespace {

// Split tasks are fewer than this per thread, and a wave runs so many spans per thread.
constexpr int PAIRS_PER_THREAD = 4, SLOTS_PER_THREAD = 8;
// Tasks per thread for which query heads of one kv head part.
constexpr int SHARED_PER_THREAD = 2;

// `body(sequence, first, last, row)` for tokens of one sequence whose outputs are wanted, in rows `row` ...: all
// tokens, or the selected ones as far as they are neighbours.
template <class Body>
void each_run(const pst_step& step, const pst_register& out, Body body) {
    const int32_t* starts = step.query_start_loc;
    if (out.rows == PST_ROWS_TOKENS) {
        for (int b = 0; b < step.num_seqs; b++) body(b, starts[b], starts[b + 1], starts[b]);
        return;
    }
    for (int r = 0, next; r < step.num_rows; r = next) {
        int first = step.rows[r], b = int(std::upper_bound(starts, starts + step.num_seqs + 1, first) - starts) - 1;
        int last = first + 1;
        for (next = r + 1; next < step.num_rows && step.rows[next] == last && last < starts[b + 1]; next++) last++;
        body(b, first, last, r);
    }
}

}  // namespace

void Attend::lay_out(const Maker& maker) {
    block_tokens = std::max(1, BLOCK_ROWS / per);
    block_rows = block_tokens * per;
    query_bytes = rule.keys.query_bytes() + rule.more.query_bytes();
    state_bytes = State::bytes(block_rows, rule.values.padded);
    pairs_max = int64_t(PAIRS_PER_THREAD) * maker.threads;
    slots = int64_t(SLOTS_PER_THREAD) * maker.threads;
    max_blocks = maker.capacity(out);
    plan_bytes = aligned(int64_t(max_blocks) * int64_t(sizeof(Block))) + aligned((pairs_max + 2 * max_blocks) * 4);
    own_bytes = plan_bytes + rule.keys.chunk_bytes() + rule.more.chunk_bytes() + rule.values.chunk_bytes() +
                aligned(query_bytes * block_rows) + 2 * state_bytes + 3 * CHUNK * 4 + scores_bytes(most_rows());
    if (rule.rotation.table) own_bytes += rule.keys.chunk_bytes() + CHUNK * int64_t(sizeof(void*));
    lasts_at = own_bytes = aligned(own_bytes);
    max_tokens = maker.max_tokens;
    if (partial) own_bytes += aligned(int64_t(2) * max_tokens * 4);
    choice_at = own_bytes;
    if (choice.wanted) own_bytes += choice.bytes();
    if (most) own_bytes += aligned(int64_t(most) * 4);
    // A program for one thread never splits.
    shared_bytes = maker.threads > 1 ? (pairs_max + slots) * state_bytes : 0;
}

Attend::Own Attend::own_memory(const Context& context) const {
    uint8_t* at = context.own_scratch;
    Own own;
    own.keys_read = context.keys_read;
    own.blocks = reinterpret_cast<Block*>(at);
    own.splits = reinterpret_cast<int32_t*>(at + aligned(int64_t(max_blocks) * int64_t(sizeof(Block))));
    own.members = own.splits + pairs_max, own.ends = own.members + max_blocks;
    own.keys = at + plan_bytes;
    own.more = own.keys + rule.keys.chunk_bytes();
    own.values = own.more + rule.more.chunk_bytes();
    own.queries = own.values + rule.values.chunk_bytes();
    own.part = own.queries + aligned(query_bytes * block_rows);
    own.whole = own.part + state_bytes;
    own.factors = reinterpret_cast<float*>(own.whole + state_bytes);
    own.more_factors = own.factors + CHUNK;
    own.value_scales = own.more_factors + CHUNK;
    own.scratch = own.value_scales + CHUNK;
    own.turned = own.scratch + scores_bytes(most_rows()) / 4;
    own.rows = reinterpret_cast<const uint8_t**>(own.turned + rule.keys.chunk_bytes() / 4);
    own.lasts = reinterpret_cast<int32_t*>(at + lasts_at), own.firsts = own.lasts + max_tokens;
    own.choice = at + choice_at;
    return own;
}

void Attend::share_out(const pst_step& step, const Own& own) const {
    const int size = step.groups[group].block_size;
    for (int b = 0; b < step.num_seqs; b++) {
        const int32_t* held = ranks < 0 ? step.groups[group].held[b] : nullptr;
        // Of the tokens before position p so many are here.
        auto before = [&](int p) {
            if (!held) return (p + ranks - 1 - rank) / ranks;
            const int32_t* at = held + p / size;
            const int rest = p % size;
            return at[0] * size + (rest && at[1] > at[0] ? rest : 0);
        };
        for (int t = step.query_start_loc[b]; t < step.query_start_loc[b + 1]; t++) {
            own.lasts[t] = before(step.positions[t] + 1) - 1;
            own.firsts[t] = before(rule.first_key(step.positions[t]));
        }
    }
}

Attend::Plan Attend::plan(const pst_step& step, const Prefixes& prefixes, int threads, const Own& own) const {
    Plan made;
    int64_t total = 0, spans = 0;
    int longest = 1;
    if (partial) share_out(step, own);
    auto blind = [&](int t) { return partial && own.firsts[t] > own.lasts[t]; };
    each_run(step, out, [&](int b, int first, int end, int row) {
        int picking = choice.first_token(step, b);
        auto picks = [&](int t) { return most ? seen(step, b, t) > most : t >= picking; };
        for (int t = first, count; t < end; t += count) {
            const bool alone = picks(t);
            for (count = 1; !alone && count < std::min(block_tokens, end - t) && !picks(t + count) && blind(t) == blind(t + count);)
                count++;
            Block& block = own.blocks[made.blocks++];
            block = Block(step, rule, b, t, count);
            block.row = row + t - first;
            block.picks = alone && (most || !block.mask) && (!rehearsed || chose(block));
            if (partial) block.share(own.lasts + t, own.firsts + t);
            if (block.blind) continue;
            total += (block.picks ? read(step, block) : block.work()) * kv_heads;
            spans += block.picks ? 1 : block.spans();
            longest = std::max(longest, block.count);
        }
    });
    made.together = heads_together(spans, longest, threads);
    if (shares_group >= 0 && prefixes.count) made.bundles = bundle(prefixes, made.blocks, threads, own);
    for (int i = 0; i < made.blocks && threads > 1; i++) {
        Block& block = own.blocks[i];
        // Fewer than PAIRS_PER_THREAD * threads tasks can be so large a part of the whole.
        int64_t work = block.work() * made.together;
        block.split = !block.picks && !block.blind && !block.bundled && block.spans() > 1 && work * PAIRS_PER_THREAD * threads > total;
        if (!block.split) continue;
        own.splits[made.splits++] = i;
        made.spans = std::max(made.spans, most_spans(block, step.groups[group].dropped != nullptr));
    }
    return made;
}

int Attend::bundle(const Prefixes& prefixes, int blocks, int threads, const Own& own) const {
    auto of = [&](int i) -> Block* {
        const int sequence = prefixes.order[i];
        auto behind = [](int b, const Block& block) { return b < block.sequence; };
        Block* end = std::upper_bound(own.blocks, own.blocks + blocks, sequence, behind);
        if (end == own.blocks || end[-1].sequence != sequence) return nullptr;
        const bool only = end - 1 == own.blocks || end[-2].sequence != sequence;
        return only && !end[-1].picks && !end[-1].mask ? end - 1 : nullptr;
    };
    // What a sequence has for itself is read head by head then, and by one thread: that must be little beside what is shared.
    auto pays = [&](int i, const Block& block) {
        const int shared = std::max(prefixes.common[i], i + 1 < prefixes.count ? prefixes.common[i + 1] : 0) / CHUNK * CHUNK;
        return 2 * (block.end - shared) <= shared;
    };
    int64_t rows = 0;
    for (int i = 0; i < blocks; i++) rows += int64_t(own.blocks[i].count) * per;
    const int64_t most = std::min<int64_t>(block_rows, rows * kv_heads / threads);
    int made = 0, members = 0;
    for (int i = 0, next; i < prefixes.count; i = std::max(next, i + 1)) {
        int64_t taken = 0;
        int common = 0;  // with the last member
        const int from = members;
        for (next = i; next < prefixes.count; next++) {
            common = std::min(common, prefixes.common[next]);
            if (members > from && common < CHUNK) break;
            Block* block = of(next);
            if (!block || !pays(next, *block)) continue;
            if (taken + int64_t(block->count) * per > most) break;
            block->common = common;
            common = block->end;
            taken += int64_t(block->count) * per;
            own.members[members++] = int32_t(block - own.blocks);
        }
        if (members - from > 1) {
            own.ends[made++] = members;
            for (int m = from; m < members; m++) own.blocks[own.members[m]].bundled = true;
        } else {
            members = from;
        }
    }
    return made;
}

int Attend::most_spans(const Block& block, bool forgets) const {
    if (!forgets) return block.spans();
    return rule.chunk ? (block.end - 1) / rule.span + 1 : block.spans() + 1;
}

int Attend::seen(const pst_step& step, int b, int t) const {
    return step.positions[t] + 1 - dropped(step.groups[group], b, lines.layer);
}

bool Attend::chose(const Block& block) const {
    return block.end <= choice.how.max_tokens && choice.most_tokens(block.end) < block.end;
}

int64_t Attend::read(const pst_step& step, const Block& block) const {
    if (most) return most;
    if (rehearsed) return choice.most_tokens(block.end);
    int size = step.groups[group].block_size;
    return int64_t(choice.count(block.end, size)) * size;
}

int Attend::heads_together(int64_t spans, int tokens, int threads) const {
    int n = lines.count > 1 ? 1 : std::min(kv_heads, block_rows / (tokens * per));
    // Parts of a kv head make its keys ready each for itself, which is better done once.
    int wanted = (parts > 1 ? SHARED_PER_THREAD : PAIRS_PER_THREAD) * threads;
    auto too_few = [&] { return threads > 1 && spans * (kv_heads / n) < wanted; };
    while (n > 1 && (kv_heads % n || too_few())) n--;
    return std::max(n, 1);
}

}  // namespace pst
