// PST_ROUTE: which experts take part in a token, and what each weighs.
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>

#include "activation.h"
#include "pieces.h"

namespace pst {

namespace {

constexpr int32_t TAKEN = INT_MIN, NOTHING = INT_MIN + 1;  // below every number; the second is a NaN's
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Whole numbers in the order of floats, a NaN below all, the two zeros equal.
int32_t key_of(float x) {
    if (std::isnan(x)) return NOTHING;
    x += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ (bits >> 31 & INT_MAX);
}

// The place of the largest of n keys, the first of equals, which is taken then.
int32_t take_best(int32_t* keys, int32_t n) {
    int32_t most = keys[0];
    for (int32_t i = 1; i < n; i++) most = keys[i] > most ? keys[i] : most;
    int32_t at = 0;
    while (keys[at] != most) at++;
    keys[at] = TAKEN;
    return at;
}

int64_t whole_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// n numbers, and room up to whole lanes behind them, become their softmax. All are NaN unless the largest is finite.
void softmax(float* x, int64_t n) {
    float most = -INFINITE;
    bool sound = true;
    for (int64_t i = 0; i < n; i++) {
        sound &= !std::isnan(x[i]);
        most = x[i] > most ? x[i] : most;
    }
    if (!sound || !std::isfinite(most)) {
        for (int64_t i = 0; i < n; i++) x[i] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    for (int64_t i = n; i < whole_lanes(n); i++) x[i] = -INFINITE;
    F total = all(0.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        // Below -100 e^x is 0 next to the largest one's 1, and exp need not take an infinity.
        F e = exp(max(all(-100.0f), load(x + i) - all(most)));
        store(x + i, e);
        if (n - i < LANES) {
            for (int64_t j = n; j < whole_lanes(n); j++) x[j] = 0.0f;
            e = load(x + i);
        }
        total = total + e;
    }
    const F whole = all(sum(total));
    for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i) / whole);
}

void root_of_softplus(float* x, int32_t n) {
    map(x, x, n, [](F v) { return softplus(v); });
    for (int32_t i = 0; i < n; i++) x[i] = std::sqrt(x[i]);
}

class Route final : public Op {
  public:
    Route(const pst_op& op, const Maker& maker)
        : in_(maker.reg(op.in[0])), out_(maker.reg(op.out)), shape_(maker.reg(op.out)), chosen_(op.n[0]), score_(op.n[1]),
          groups_(op.n[2]), top_groups_(op.n[3]), by_two_(op.n[4]), renormalize_(op.n[5]), chosen_only_(op.n[6]),
          alike_(op.n[7]), scale_(op.f[0]), far_(op.f[1]), correction_(static_cast<const float*>(op.p[0])),
          scales_(static_cast<const float*>(op.p[1])), listed_(static_cast<const int32_t*>(op.p[2])) {
        const int32_t count = in_.width;
        check(maker.reg(op.in[0]).rows == shape_.rows, "logits of a router and routes have rows of one kind");
        check(chosen_ >= 1 && (chosen_ <= count || score_ == EVEN), "a token chooses one expert at least, and no more than there are");
        check(out_.width == 2 * chosen_, "routes are an id and a weight of every chosen expert");
        check(score_ >= SOFTMAX && score_ <= EVEN, "scores are softmax, sigmoid, SparseMixer's, the root of softplus or even");
        check(score_ != EVEN || listed_, "experts that weigh the same are listed");
        check(score_ != SPARSE_MIXER || far_ >= 0, "SparseMixer's distance is not negative");
        check(!listed_ || shape_.rows == PST_ROWS_TOKENS, "only rows of tokens have listed experts");
        check(groups_ >= 1 && count % groups_ == 0, "groups of experts are equally large");
        check(top_groups_ >= 1 && top_groups_ <= groups_, "one group at least takes part, and no more than there are");
        check(chosen_ <= count / groups_ * top_groups_ || score_ == EVEN, "the best groups hold fewer experts than a token chooses");
        keys_at_ = aligned(whole_lanes(count) * 4);
        worth_at_ = keys_at_ + aligned(int64_t(count) * 4);
        ids_at_ = worth_at_ + aligned(int64_t(groups_) * 4);
        weights_at_ = ids_at_ + aligned(int64_t(chosen_) * 4);
        own_bytes = weights_at_ + aligned(whole_lanes(chosen_) * 4);
    }

    void run(Team& team, const Context& context) const override {
        const int64_t grain = std::max<int64_t>(1, 2048 / in_.width);
        for (int64_t first, last; team.next(grain, context.rows(shape_), first, last);)
            for (int64_t r = first; r < last; r++)
                row(in_.row(r), listed_ ? listed_ + (alike_ ? 0 : int64_t(context.step.token_ids[r]) * chosen_) : nullptr,
                    out_.row(r), context.own_scratch);
    }

  private:
    enum Score { SOFTMAX, SIGMOID, SPARSE_MIXER, ROOT, EVEN };

    void row(const float* logits, const int32_t* listed, float* out, uint8_t* scratch) const {
        auto* scores = reinterpret_cast<float*>(scratch);
        auto* ids = reinterpret_cast<int32_t*>(scratch + ids_at_);
        auto* weights = reinterpret_cast<float*>(scratch + weights_at_);
        if (score_ == SPARSE_MIXER) mix(logits, scores, ids, weights, scratch);
        else if (score_ == EVEN) even(listed, ids, weights);
        else choose(logits, listed, scores, ids, weights, scratch);
        for (int32_t k = 0; k < chosen_; k++) {
            const float weight = weights[k] * scale_;
            out[k] = float(ids[k]);
            out[chosen_ + k] = scales_ ? weight * scales_[ids[k]] : weight;
        }
    }

    // Those that are listed, in the order of ids, of which each weighs as much.
    void even(const int32_t* listed, int32_t* ids, float* weights) const {
        for (int32_t k = 0; k < chosen_; k++) ids[k] = listed[k], weights[k] = renormalize_ ? 1.0f / float(chosen_) : 1.0f;
    }

    // The best of all by their scores, in the order of ids, and what they weigh.
    void choose(const float* logits, const int32_t* listed, float* scores, int32_t* ids, float* weights, uint8_t* scratch) const {
        auto* keys = reinterpret_cast<int32_t*>(scratch + keys_at_);
        const int32_t count = in_.width;
        std::memcpy(scores, logits, size_t(count) * 4);
        if (score_ == SIGMOID) map(scores, scores, count, [](F x) { return activate(x, PST_SIGMOID); });
        else if (score_ == ROOT) root_of_softplus(scores, count);
        else softmax(scores, count);
        for (int32_t i = 0; i < count; i++) keys[i] = key_of(correction_ ? scores[i] + correction_[i] : scores[i]);
        if (groups_ > 1) keep_best_groups(scores, keys, reinterpret_cast<int32_t*>(scratch + worth_at_));
        for (int32_t k = 0; k < chosen_; k++) {
            const int32_t id = listed ? listed[k] : take_best(keys, count);
            int32_t at = k;
            for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1];
            ids[at] = id;
        }
        for (int32_t k = 0; k < chosen_; k++) weights[k] = (chosen_only_ ? logits : scores)[ids[k]];
        if (chosen_only_) softmax(weights, chosen_);
        if (!renormalize_) return;
        float total = 0.0f;
        for (int32_t k = 0; k < chosen_; k++) total += weights[k];
        if (score_ == SIGMOID) total += 1e-20f;
        for (int32_t k = 0; k < chosen_; k++) weights[k] /= total;
    }

    // One after the other: the best of those left weighs its share of a softmax over those left that are near it.
    // Source: Liu et al., GRIN, arXiv 2409.12136, section 2.2.
    void mix(const float* logits, float* shares, int32_t* ids, float* weights, uint8_t* scratch) const {
        auto* keys = reinterpret_cast<int32_t*>(scratch + keys_at_);
        const int32_t count = in_.width;
        for (int32_t i = 0; i < count; i++) keys[i] = key_of(logits[i]);
        for (int32_t k = 0; k < chosen_; k++) {
            const int32_t id = take_best(keys, count);
            const float best = logits[id];
            for (int32_t i = 0; i < count; i++) {
                const float x = logits[i], size = std::fabs(x) > best ? std::fabs(x) : best;
                const bool left = keys[i] != TAKEN || i == id;
                shares[i] = left && !((best - x) / size > far_) ? x : -INFINITE;
            }
            softmax(shares, count);
            int32_t at = k;
            for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1], weights[at] = weights[at - 1];
            ids[at] = id, weights[at] = shares[id];
        }
    }

    // Experts outside the best groups become minus infinity.
    void keep_best_groups(const float* scores, int32_t* keys, int32_t* worth) const {
        const int32_t size = in_.width / groups_;
        for (int32_t g = 0; g < groups_; g++) {
            float best = -INFINITE, second = -INFINITE;
            bool sound = true;
            for (int32_t i = g * size; i < (g + 1) * size; i++) {
                const float x = correction_ ? scores[i] + correction_[i] : scores[i];
                sound &= !std::isnan(x);
                if (x > best) second = best, best = x;
                else if (x > second) second = x;
            }
            const bool sums = by_two_ && size > 1;
            worth[g] = !sound ? NOTHING : key_of(sums ? second + best : best);
        }
        for (int32_t i = 0; i < top_groups_; i++) take_best(worth, groups_);
        for (int32_t g = 0; g < groups_; g++)
            for (int32_t i = g * size; worth[g] != TAKEN && i < (g + 1) * size; i++) keys[i] = key_of(-INFINITE);
    }

    View in_, out_;
    pst_register shape_;
    int32_t chosen_, score_, groups_, top_groups_, by_two_, renormalize_, chosen_only_, alike_;
    float scale_, far_;  // SparseMixer's: how far from the best one an expert may be, of the larger of both
    const float *correction_, *scales_;
    const int32_t* listed_;
    int64_t keys_at_, worth_at_, ids_at_, weights_at_;
};

}  // namespace

OpPtr make_route(const pst_op& op, const Maker& maker) { return std::make_unique<Route>(op, maker); }

}  // namespace pst
