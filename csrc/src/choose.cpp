// PST_CHOOSE: which tokens a token's sparse attention reads.
//
// Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1. Scores of all that a token sees, one chain per head over the
// components and one per score over the heads: so neither pages nor company nor threads show. Some tokens at a time have
// their scores in memory; chunks of keys are shared out over the threads, then tokens.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"

namespace pst {

namespace {

// Scores that exist at once, and query heads that meet a chunk made ready.
constexpr int64_t SCORE_BYTES = int64_t(16) << 20;
constexpr int QUERY_ROWS = 256;
constexpr int GROUP = 8;  // rows whose products exist at once
constexpr int TREE = 64;  // nodes of a tree, which have slots behind all positions

// Larger scores are smaller keys, a NaN's is the largest. There is one zero: sums begin with it.
inline uint32_t key_of(float score) {
    if (std::isnan(score)) return UINT32_MAX;
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

// Tokens of one sequence, neighbours in the step, that see more than are chosen.
struct Some {
    int32_t sequence, first, count;
    int32_t slots;  // of the last one's
};

// Where a unit of work falls: its block, and how many units and tokens the blocks before it have.
struct Place {
    int block = 0;
    int64_t units = 0, tokens = 0;

    // `each`: units of a block. A thread's units ascend, but for those that it takes from others.
    template <class Each>
    void find(const Some* blocks, int64_t unit, Each each) {
        if (unit < units) *this = Place();
        for (; unit >= units + each(blocks[block]); block++) units += each(blocks[block]), tokens += blocks[block].count;
    }
};

class Choose final : public Op {
  public:
    Choose(const pst_op& op, const Maker& maker)
        : queries_(maker.reg(op.in[0])), weights_(maker.reg(op.in[1])), out_(maker.reg(op.out)), group_(op.n[0]),
          line_(op.n[1]), heads_(op.n[2]), dim_(op.n[3]), most_(out_.width), max_slots_(op.n[5] + TREE) {
        const pst_plane& keys = maker.plane(group_, op.n[4]);
        check(line_ >= 0 && heads_ > 0 && dim_ > 0, "a layer, a head and a number of a key there are at least");
        check(check_plane(keys, 1, dim_) == 1, "one head of keys for all");
        check(int64_t(heads_) * dim_ == queries_.width && weights_.width == heads_, "heads do not fill the register");
        check(queries_.rows == PST_ROWS_TOKENS && weights_.rows == PST_ROWS_TOKENS && out_.rows == PST_ROWS_TOKENS,
              "queries, weights and what they choose are by tokens");
        check(op.n[5] > 0 && op.n[5] < 1 << 24, "a sequence has a token, and slots are exact as floats");
        rule_.scale = op.f[0];
        rule_.keys = rule_.stored = rule_.values = Side(keys, scales_of(maker, group_, keys), dim_, 2 * LANES);
        tokens_ = std::max(1, QUERY_ROWS / heads_);
        stride_ = round_up(max_slots_, CHUNK);
        room_ = std::max<int64_t>(1, std::min<int64_t>(maker.max_tokens, SCORE_BYTES / (stride_ * 4)));
        query_bytes_ = rule_.keys.query_bytes();
        queries_at_ = aligned(int64_t(maker.max_tokens) * int64_t(sizeof(Some)));
        factors_at_ = queries_at_ + aligned(query_bytes_ * tokens_ * heads_);
        chunk_at_ = factors_at_ + CHUNK * 4;
        products_at_ = chunk_at_ + rule_.keys.chunk_bytes();
        own_bytes = std::max(products_at_ + GROUP * CHUNK * 4, queries_at_ + aligned(int64_t(max_slots_) * 4));
        shared_bytes = room_ * stride_ * 4;
    }

    void run(Team& team, const Context& context) const override {
        auto* blocks = reinterpret_cast<Some*>(context.own_scratch);
        const int count = plan(context.step, blocks);
        for (int first = 0, last; first < count; first = last) {
            if (first) team.barrier();
            int64_t tokens = 0;
            for (last = first; last < count && tokens + blocks[last].count <= room_; last++) tokens += blocks[last].count;
            score(team, context, blocks + first, last - first);
            team.barrier();
            choose(team, context, blocks + first, tokens);
        }
    }

  private:
    bool is_node(const pst_step& step, int t) const { return step.mask && step.mask[t]; }
    int forgotten(const pst_step& step, int b) const { return dropped(step.groups[group_], b, line_); }
    // Tokens that t sees.
    int seen(const pst_step& step, int b, int t) const {
        return std::min(step.positions[t] + 1 - forgotten(step, b), max_slots_);
    }
    // Slots among which those are: of the nodes of a tree some are others' only.
    int slots(const pst_step& step, int b, int t) const {
        return std::min(slot_of(step, b, t) + 1 - forgotten(step, b), max_slots_);
    }

    int plan(const pst_step& step, Some* blocks) const {
        const int most_tokens = int(std::min<int64_t>(tokens_, room_));
        int count = 0;
        for (int b = 0; b < step.num_seqs; b++) {
            const int end = step.query_start_loc[b + 1];
            for (int t = step.query_start_loc[b]; t < end; t++) {
                if (seen(step, b, t) <= most_) continue;
                Some& some = blocks[count++] = {b, t, 1, slots(step, b, t)};
                for (; some.count < most_tokens && t + 1 < end && seen(step, b, t + 1) > most_; some.count++, t++) {}
                some.slots = slots(step, b, t);
            }
        }
        return count;
    }

    // Units are chunks of keys of a block. Scores of tokens lie one behind the other.
    void score(Team& team, const Context& context, const Some* blocks, int count) const {
        int64_t units = 0;
        for (int i = 0; i < count; i++) units += (blocks[i].slots + CHUNK - 1) / CHUNK;
        Place at;
        int ready = -1;
        for (int64_t unit, end; team.next(1, units, unit, end);)
            for (; unit < end; unit++) {
                at.find(blocks, unit, [](const Some& some) { return (some.slots + CHUNK - 1) / CHUNK; });
                if (ready != at.block) take_queries(blocks[at.block], context.own_scratch + queries_at_);
                ready = at.block;
                score_chunk(context, blocks[ready], int(unit - at.units) * CHUNK, at.tokens);
            }
    }

    void take_queries(const Some& some, uint8_t* to) const {
        for (int t = some.first; t < some.first + some.count; t++)
            for (int h = 0; h < heads_; h++, to += query_bytes_)
                gather_query(rule_.keys, queries_.data + t * queries_.stride + int64_t(h) * dim_, to);
    }

    void score_chunk(const Context& context, const Some& some, int start, int64_t row) const {
        Ahead nothing{};
        Places places;
        const int end = std::min(start + CHUNK, some.slots), tiles = (end - start + TILE - 1) / TILE;
        uint8_t* own = context.own_scratch;
        auto *factors = reinterpret_cast<float*>(own + factors_at_), *products = reinterpret_cast<float*>(own + products_at_);
        places.first = 0, places.last = end - start;
        find_slots(rule_, Pages(context.step.groups[group_], some.sequence, line_), 0, start, start, end, places);
        gather_scales(rule_.keys, places, places.key_scales, rule_.scale, factors);
        gather_keys(rule_.keys, places.keys, 0, places.last, nothing, own + chunk_at_);
        const uint8_t* query = own + queries_at_;
        for (int i = 0; i < some.count; i++) {
            const float* weights = weights_.data + (some.first + i) * weights_.stride;
            float* out = reinterpret_cast<float*>(context.shared_scratch) + (row + i) * stride_ + start;
            for (int at = 0; at < tiles * TILE; at += TILE) store(out + at, all(0.0f));
            for (int h = 0, some_heads; h < heads_; h += some_heads, query += query_bytes_ * some_heads) {
                some_heads = std::min(GROUP, heads_ - h);
                score_keys(rule_.keys, some_heads, query, query_bytes_, own + chunk_at_, factors, 0, tiles, products);
                for (int at = 0; at < tiles * TILE; at += TILE) {
                    F sum = load(out + at);
                    for (int r = 0; r < some_heads; r++)
                        sum = fma(all(weights[h + r]), max(all(0.0f), load(products + r * CHUNK + at)), sum);
                    store(out + at, sum);
                }
            }
        }
    }

    void choose(Team& team, const Context& context, const Some* blocks, int64_t tokens) const {
        Place at;
        for (int64_t i, end; team.next(1, tokens, i, end);)
            for (; i < end; i++) {
                at.find(blocks, i, [](const Some& some) { return some.count; });
                auto* scores = reinterpret_cast<const float*>(context.shared_scratch) + i * stride_;
                choose_one(context, blocks[at.block].sequence, blocks[at.block].first + int(i - at.tokens), scores);
            }
    }

    // `body(slot)` for every slot that token t sees, ascending.
    template <class Body>
    void each_slot(const pst_step& step, int b, int t, Body body) const {
        const int first = step.query_start_loc[b], own = slots(step, b, t);
        const int shared = is_node(step, t) ? std::min(step.positions[first], own) : own;
        for (int slot = 0; slot < shared; slot++) body(slot);
        if (!is_node(step, t)) return;
        for (uint64_t left = step.mask[t]; left; left &= left - 1)
            if (int slot = step.positions[first] + __builtin_ctzll(left); slot < own) body(slot);
    }

    void choose_one(const Context& context, int b, int t, const float* scores) const {
        auto* keys = reinterpret_cast<uint32_t*>(context.own_scratch + queries_at_);
        int count = 0;
        each_slot(context.step, b, t, [&](int slot) { keys[count++] = key_of(scores[slot]); });
        if (count <= most_) return;  // of a sequence that is longer than was said
        std::nth_element(keys, keys + most_ - 1, keys + count);
        const uint32_t last = keys[most_ - 1];
        int equal = most_;
        for (int i = 0; i < most_; i++) equal -= keys[i] < last;
        float* out = out_.data + t * out_.stride;
        each_slot(context.step, b, t, [&](int slot) {
            const uint32_t key = key_of(scores[slot]);
            if (key < last || (key == last && equal-- > 0)) *out++ = float(slot);
        });
    }

    pst_register queries_, weights_, out_;
    Rule rule_{};
    int group_, line_, heads_, dim_, most_, max_slots_;
    int tokens_;                  // of a block
    int64_t room_, stride_;       // tokens whose scores exist at once, floats of each
    int64_t query_bytes_;
    int64_t queries_at_, factors_at_, chunk_at_, products_at_;  // in a thread's scratch, behind the blocks
};

}  // namespace

OpPtr make_choose(const pst_op& op, const Maker& maker) { return std::make_unique<Choose>(op, maker); }

}  // namespace pst
