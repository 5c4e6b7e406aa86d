// PST_REHEARSE: which tokens a layer's kv heads read, by queries of the layer before.
//
// Source: InfiniGen, arXiv 2406.19707, section 4.3. Chunks of keys, cut at absolute positions, are shared out over the
// threads, then tokens; a score is one chain over the components, a sum of weights goes over the query heads in
// order: so neither pages nor company nor threads show.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "pages.h"

namespace pst {

namespace {

constexpr int64_t SCORE_BYTES = int64_t(16) << 20;  // of scores that exist at once

// Larger scores are smaller keys, a NaN's is the smallest.
inline uint32_t key_of(float score) {
    score = score == score ? score + 0.0f : HUGE_VALF;
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

struct Chooser {
    int32_t sequence, token, before;  // tokens before it
};

class Rehearse final : public Op {
  public:
    Rehearse(const pst_op& op, const Maker& maker)
        : queries_(maker.reg(op.in[0])), out_(maker.reg(op.out)), group_(op.n[0]), line_(op.n[1]), heads_(op.n[2]),
          kv_heads_(op.n[3]), dim_(op.n[4]), late_(op.n[6]), reach_(op.f[1]),
          counts_(static_cast<std::atomic<int64_t>*>(const_cast<void*>(op.p[0]))) {
        check(op.p[3], "a rehearsal needs its budget");
        choice_ = PageChoice(*static_cast<const pst_pages*>(op.p[3]));
        const pst_plane& keys = maker.plane(group_, op.n[5]);
        check(line_ >= 0 && heads_ > 0 && kv_heads_ > 0 && heads_ % kv_heads_ == 0, "kv heads do not divide heads");
        check(keys.dtype != PST_I8 && check_plane(keys, kv_heads_, dim_) == 1, "parts of keys are numbers, of all kv heads");
        words_ = (choice_.how.max_tokens + 31) / 32;
        check(int64_t(heads_) * dim_ == queries_.width && int64_t(words_) * kv_heads_ == out_.width,
              "heads do not fill the register");
        check(queries_.rows == PST_ROWS_TOKENS && out_.rows == PST_ROWS_TOKENS, "queries and what they choose are by tokens");
        check(reach_ >= 0, "a reach is a distance");
        rule_.scale = op.f[0];
        rule_.keys = rule_.stored = rule_.values = Side(keys, {}, dim_, 2 * LANES);
        per_ = heads_ / kv_heads_;
        query_bytes_ = rule_.keys.query_bytes();
        stride_ = round_up(choice_.how.max_tokens, CHUNK);
        row_ = stride_ * heads_;
        room_ = std::max<int64_t>(1, std::min<int64_t>(maker.max_tokens, SCORE_BYTES / (row_ * 4)));
        queries_at_ = aligned(int64_t(maker.max_tokens) * int64_t(sizeof(Chooser)));
        factors_at_ = queries_at_ + aligned(query_bytes_ * ROW_GROUP);
        chunk_at_ = factors_at_ + CHUNK * 4;
        products_at_ = chunk_at_ + rule_.keys.chunk_bytes();
        own_bytes = std::max(products_at_ + ROW_GROUP * CHUNK * 4, queries_at_ + aligned(stride_ * 8) + aligned(stride_) + stride_ * 4 * kv_heads_);
        shared_bytes = room_ * row_ * 4;
    }

    void run(Team& team, const Context& context) const override {
        auto* all = reinterpret_cast<Chooser*>(context.own_scratch);
        const int64_t count = plan(context.step, all);
        for (int64_t first = 0; first < count; first += room_) {
            if (first) team.barrier();
            const int64_t some = std::min(room_, count - first);
            score(team, context, all + first, some);
            team.barrier();
            for (int64_t i, end; team.next(1, some, i, end);)
                for (; i < end; i++) choose(context, all[first + i], i);
        }
    }

  private:
    int64_t plan(const pst_step& step, Chooser* all) const {
        int64_t count = 0;
        for (int b = 0; b < step.num_seqs; b++) {
            const int first = step.query_start_loc[b], end = step.query_start_loc[b + 1];
            const int from = std::max(choice_.first_token(step, b), late_ ? first + 1 : first);
            for (int t = from; t < (late_ ? end : std::min(end, first + 1)); t++) {
                const int slots = step.positions[t] + 1;
                if ((step.mask && step.mask[t]) || slots > choice_.how.max_tokens) continue;
                if (choice_.most_tokens(slots) < slots) all[count++] = {b, t, slots - 1};
            }
        }
        return count;
    }

    float* scores_of(const Context& context, int64_t nth, int head) const {
        return reinterpret_cast<float*>(context.shared_scratch) + nth * row_ + head * stride_;
    }

    // Units are chunks of keys of a kv head, and one token.
    void score(Team& team, const Context& context, const Chooser* some, int64_t count) const {
        int64_t units = 0;
        for (int64_t i = 0; i < count; i++) units += int64_t((some[i].before + CHUNK - 1) / CHUNK) * kv_heads_;
        int64_t nth = 0, before = 0;
        for (int64_t unit, end; team.next(1, units, unit, end);)
            for (; unit < end; unit++) {
                if (unit < before) nth = before = 0;
                auto each = [&] { return int64_t((some[nth].before + CHUNK - 1) / CHUNK) * kv_heads_; };
                while (unit >= before + each()) before += each(), nth++;
                const int at = int(unit - before);
                score_chunk(context, some[nth], nth, at % kv_heads_, at / kv_heads_ * CHUNK);
            }
    }

    void score_chunk(const Context& context, const Chooser& one, int64_t nth, int head, int start) const {
        Ahead nothing{};
        Places places;
        const int end = std::min(start + CHUNK, one.before), tiles = (end - start + TILE - 1) / TILE;
        uint8_t *own = context.own_scratch, *query = own + queries_at_, *chunk = own + chunk_at_;
        auto *factors = reinterpret_cast<float*>(own + factors_at_), *products = reinterpret_cast<float*>(own + products_at_);
        places.first = 0, places.last = end - start;
        find_slots(rule_, Pages(context.step.groups[group_], one.sequence, line_), head, start, start, end, places);
        gather_scales(rule_.keys, places, places.key_scales, rule_.scale, factors);
        gather_keys(rule_.keys, places.keys, 0, places.last, nothing, chunk);
        const float* queries = queries_.data + one.token * queries_.stride + int64_t(head) * per_ * dim_;
        for (int h = 0, rows; h < per_; h += rows) {
            rows = std::min(ROW_GROUP, per_ - h);
            for (int r = 0; r < rows; r++)
                gather_query(rule_.keys, queries + int64_t(h + r) * dim_, query + r * query_bytes_);
            score_keys(rule_.keys, rows, query, query_bytes_, chunk, factors, 0, tiles, products);
            for (int r = 0; r < rows; r++)
                std::copy(products + r * CHUNK, products + r * CHUNK + end - start,
                          scores_of(context, nth, head * per_ + h + r) + start);
        }
    }

    // What each token before it weighs for a kv head, and how many are near enough.
    int weigh(const Context& context, const Chooser& one, int head, int64_t nth, float* likely, uint8_t* wanted) const {
        const int n = one.before, recent = std::max(0, n + 1 - choice_.how.recent);
        std::fill(likely, likely + n, 0.0f);
        std::fill(wanted, wanted + n, uint8_t(0));
        for (int h = 0; h < per_; h++) {
            float* scores = scores_of(context, nth, head * per_ + h);
            float top = NOTHING, sum = 0;
            for (int i = 0; i < n; i++) {
                if (scores[i] != scores[i]) scores[i] = HUGE_VALF;
                top = std::max(top, scores[i]);
            }
            for (int i = 0; i < n; i++) wanted[i] |= scores[i] >= top - reach_;
            // What lies far below weighs nothing that could show; an infinite one weighs as much as it can.
            for (int i = 0; i < n; i++) {
                scores[i] = scores[i] == top ? 1.0f : scores[i] < top - 80 ? 0.0f : std::exp(scores[i] - top);
                sum += scores[i];
            }
            for (int i = 0; i < n; i++) likely[i] += scores[i] / sum;
        }
        int count = n - recent;
        for (int i = 0; i < recent; i++) count += wanted[i];
        return count;
    }

    void choose(const Context& context, const Chooser& one, int64_t nth) const {
        const int n = one.before, recent = std::max(0, n + 1 - choice_.how.recent);
        uint8_t* own = context.own_scratch + queries_at_;
        auto* ranks = reinterpret_cast<uint64_t*>(own);
        auto* wanted = own + aligned(stride_ * 8);
        auto* likely = reinterpret_cast<float*>(wanted + aligned(stride_));
        int64_t near = 0;
        for (int g = 0; g < kv_heads_; g++) near += weigh(context, one, g, nth, likely + g * stride_, wanted);
        const int count = std::min(choice_.most_tokens(n + 1) - 1, int((near + kv_heads_ - 1) / kv_heads_));
        auto* bits = reinterpret_cast<uint32_t*>(out_.data + one.token * out_.stride);
        std::fill(bits, bits + int64_t(words_) * kv_heads_, 0u);
        for (int g = 0; g < kv_heads_; g++, bits += words_) {
            for (int i = 0; i < n; i++)
                ranks[i] = uint64_t(i >= recent ? 0 : key_of(likely[g * stride_ + i])) << 32 | uint32_t(i);
            if (count > 0 && count < n) std::nth_element(ranks, ranks + count - 1, ranks + n);
            for (int i = 0; i < count; i++) bits[uint32_t(ranks[i]) / 32] |= 1u << (uint32_t(ranks[i]) % 32);
            bits[n / 32] |= 1u << (n % 32);
        }
        if (counts_) {
            counts_[0].fetch_add(int64_t(count + 1) * kv_heads_, std::memory_order_relaxed);
            counts_[1].fetch_add(int64_t(n + 1) * kv_heads_, std::memory_order_relaxed);
        }
    }

    pst_register queries_, out_;
    Rule rule_{};
    PageChoice choice_;
    int group_, line_, heads_, kv_heads_, dim_, late_, per_, words_;
    float reach_;
    std::atomic<int64_t>* counts_;
    int64_t query_bytes_, stride_, row_;  // floats of a query head's scores, and of a token's
    int64_t room_;                        // tokens whose scores exist at once
    int64_t queries_at_, factors_at_, chunk_at_, products_at_;  // in a thread's scratch, behind the choosers
};

}  // namespace

OpPtr make_rehearse(const pst_op& op, const Maker& maker) { return std::make_unique<Rehearse>(op, maker); }

}  // namespace pst
