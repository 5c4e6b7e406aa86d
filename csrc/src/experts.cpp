// PST_EXPERTS: each token through the experts it chose.
//
// Every thread sorts the (token, choice) pairs of the step by expert, all in the same way; an expert's pairs are rows of
// its products. So nothing is padded and nobody is left out, and only what was chosen is read. Units of the first products
// are panels of an expert; units of the last one are panels of all experts, whose results each token adds in the order of
// their ids.
//
// Ranks share experts out in one of two ways. By outputs: each has some of every expert's rows; those of the first products
// are put side by side between the products, and the last one's outputs stay apart. Or each has whole experts: see
// experts_ranks.h. In both ways a number is made of the same ones in the same order as on one rank.
#include <cstring>
#include <optional>

#include "epilogue.h"
#include "experts_ranks.h"
#include "segment.h"

namespace pst {

namespace {

// Bytes that rows between the products may take: of longer steps so many tokens at a time.
constexpr int64_t BETWEEN_BYTES = int64_t(64) << 20;

// The pairs of some tokens, sorted by expert, then by token.
struct Sorted {
    int32_t* starts;  // [X + 1] where the pairs of each expert begin
    int32_t* chosen;  // [num_chosen] experts that somebody chose
    int32_t* pairs;   // [P] token * K + choice
    int32_t num_chosen;

    int32_t count(int32_t expert) const { return starts[expert + 1] - starts[expert]; }
};

class Experts final : public Op {
  public:
    struct Shape {
        int32_t num_experts, top_k;
        bool scale_input;
        int32_t activation;
        float limit;
    };

    // Ranks that have some columns each between the products.
    struct Shared {
        Exchange exchange;
        Columns columns;
    };

    // `first`: of every own expert gate and up as a pair, or up; or gate, and in `second` up.
    Experts(const pst_matrix* first, const pst_matrix* second, const pst_matrix* down, const Shape& shape,
            const pst_register& in, const pst_register& routes, const pst_register* residual, const pst_register& out,
            int64_t capacity, std::optional<Shared> shared, std::optional<Apart> apart)
        : shape_(shape), in_(in), routes_(routes), residual_(residual ? *residual : out), out_(out),
          adds_(residual != nullptr), width_(first->pair ? first->rows / 2 : first->rows),
          full_(shared ? shared->columns.starts.back() : width_), split_(second != nullptr), shared_(std::move(shared)),
          apart_(std::move(apart)), first_expert_(apart_ ? apart_->first : 0),
          num_own_(apart_ ? apart_->count : shape.num_experts) {
        first_.kind = split_ ? Epilogue::PLAIN : first->pair ? Epilogue::GATED : Epilogue::ACTIVATED;
        first_.activation = shape.activation;
        first_.limit = shape.limit;
        for (int32_t i = 0; i < num_own_; i++) {
            up_.emplace_back(first[i]);
            if (split_) up_.emplace_back(second[i]);
            down_.emplace_back(down[i]);
        }
        one_preparation_ = !shape.scale_input;
        bool all_of_codes = true;
        int64_t unpacked = 0, tile_rows = 1;
        for (const Segment& s : up_) {
            const Preparation p = s.preparation();
            one_preparation_ &= p == up_[0].preparation();
            row_bytes_ = std::max(row_bytes_, p.row_bytes);
        }
        if (!one_preparation_)
            for (int32_t i = 0; i < num_own_ && split_; i++)
                if (!(up(i, 0).preparation() == up(i, 1).preparation())) sets_ = 2;
        for (const Segment& s : down_) inner_bytes_ = std::max(inner_bytes_, s.preparation().row_bytes);
        for (const std::vector<Segment>* segments : {&up_, &down_})
            for (const Segment& s : *segments) {
                all_of_codes &= s.matrix.format == PST_M_BLOCK;
                unpacked = std::max(unpacked, s.unpacked_bytes());
                tile_rows = std::max<int64_t>(tile_rows, s.product->tile_rows);
            }
        block_rows_ = near(row_bytes_);
        inner_rows_ = near(inner_bytes_);
        const int64_t columns = split_ ? 2 * width_ : width_, k = shape.top_k;
        int64_t each = k * (columns * 4 + inner_bytes_) + (one_preparation_ ? row_bytes_ : sets_ * k * row_bytes_);
        // All ranks take the same tokens at a time, whatever formats their own experts have.
        if (shared_ || apart_) each = k * (16 * full_ + 16 * int64_t(in.width) + (apart_ ? 4 * int64_t(out.width) : 0));
        tokens_ = std::max<int64_t>(1, std::min(capacity, BETWEEN_BYTES / each));
        const int64_t pairs = tokens_ * k;
        few_rows_ = std::min(one_preparation_ ? tokens_ : pairs * sets_, FEW_NUMBERS / in.width);
        few_pairs_ = std::min(pairs, FEW_NUMBERS / full_);
        // A thread's own: one row as floats, one in another order, sums, what is unpacked, the sorted pairs, an expert's rows.
        const int64_t longest = aligned(std::max<int64_t>(in.width, full_) * 4);
        ordered_at_ = longest;
        tile_at_ = ordered_at_ + longest;
        unpacked_at_ = tile_at_ + tile_rows * PANEL * 4;
        sorted_at_ = unpacked_at_ + unpacked;
        gathered_at_ = sorted_at_ + aligned((2 * int64_t(num_own_) + 1 + pairs) * 4);
        few_at_ = gathered_at_ + (one_preparation_ ? std::min(block_rows_, tokens_) * row_bytes_ : 0);
        few_inner_at_ = few_at_ + few_rows_ * row_bytes_;
        traffic_at_ = few_inner_at_ + few_pairs_ * inner_bytes_;
        own_bytes = traffic_at_ + (apart_ ? Apart::list_bytes(pairs) : 0);
        // Everybody's: rows, what the first products give, the same prepared; what ranks have put side by side of it, or
        // results of pairs.
        inner_at_ = (one_preparation_ ? tokens_ : pairs * sets_) * row_bytes_;
        prepared_at_ = inner_at_ + aligned(pairs * columns * 4);
        exchanged_at_ = prepared_at_ + pairs * inner_bytes_;
        shared_bytes = exchanged_at_ + (shared_ ? aligned(pairs * full_ * 4) : apart_ ? pairs * out.width * 4 : 0);
    }

    void run(Team& team, const Context& context) const override {
        const int64_t count = context.rows(in_);
        uint32_t turn = shared_ ? shared_->exchange.turn() : apart_ ? apart_->exchange.turn() : 0;
        for (int64_t t = 0; t < count; t += tokens_) {
            if (t) team.barrier();
            some(team, context, t, std::min(tokens_, count - t), turn);
        }
    }

    bool move(int32_t pointer, int32_t index, const void* data) override {
        if (pointer < 0 || pointer > 2 || (pointer == 1 && !split_) || index < 0 || index >= num_own_) return false;
        if (!data || reinterpret_cast<uintptr_t>(data) % 64) return false;
        Segment& segment = pointer == 2 ? down_[size_t(index)] : up_[size_t(split_ ? 2 * index + pointer : index)];
        segment.matrix.data = data;
        return true;
    }

  private:
    // Rows of so many bytes that stay in the second cache.
    static int64_t near(int64_t bytes) {
        return std::min<int64_t>(MAX_TILE_ROWS, std::max(BLOCK_ROWS, NEAR_BYTES / bytes / ROW_STEP * ROW_STEP));
    }

    const Segment& up(int32_t expert, int64_t half) const { return up_[size_t(split_ ? 2 * expert + half : expert)]; }

    int32_t expert_of(int64_t token, int64_t choice) const {
        const float id = routes_.data[token * routes_.stride + choice];
        return id >= 0 && id < float(shape_.num_experts) ? int32_t(id) : 0;
    }
    // Among those of this rank; below 0 or above them: another rank's.
    int32_t own_of(int64_t token, int64_t choice) const { return expert_of(token, choice) - first_expert_; }
    float share_of(int64_t token, int64_t choice) const {
        return routes_.data[token * routes_.stride + shape_.top_k + choice];
    }

    // Of this rank's experts.
    Sorted sorted(int64_t t, int64_t count, uint8_t* scratch) const {
        auto* starts = reinterpret_cast<int32_t*>(scratch + sorted_at_);
        const int32_t x = num_own_, k = shape_.top_k;
        Sorted s{starts, starts + x + 1, starts + 2 * x + 1, 0};
        std::memset(starts, 0, size_t(x + 1) * 4);
        for (int64_t i = 0; i < count; i++)
            for (int32_t j = 0; j < k; j++)
                if (const int32_t e = own_of(t + i, j); e >= 0 && e < x) starts[e]++;
        // Ends of the experts' runs, which fill from behind and so become their starts.
        int32_t sum = 0;
        for (int32_t e = 0; e < x; e++) {
            if (starts[e]) s.chosen[s.num_chosen++] = e;
            sum += starts[e];
            starts[e] = sum;
        }
        starts[x] = sum;
        for (int64_t i = count; i-- > 0;)
            for (int32_t j = k; j-- > 0;)
                if (const int32_t e = own_of(t + i, j); e >= 0 && e < x) s.pairs[--starts[e]] = int32_t(i * k + j);
        return s;
    }

    // Tokens t ... t+count-1. `turn`: of the next exchange.
    void some(Team& team, const Context& context, int64_t t, int64_t count, uint32_t& turn) const {
        const Sorted sorted = this->sorted(t, count, context.own_scratch);
        const int64_t pairs = sorted.starts[num_own_];
        auto* exchanged = reinterpret_cast<float*>(context.shared_scratch + exchanged_at_);
        if (pairs) products(team, context, sorted, t, count, exchanged, turn);
        if (!apart_) return;
        team.barrier();
        const Traffic traffic = apart_->traffic(count, shape_.top_k, context.own_scratch + traffic_at_,
                                                [&](int64_t i, int64_t j) { return expert_of(t + i, j); });
        apart_->dispatch(team, turn, traffic, exchanged);
        apart_->gather(
            team, turn, count, [&](int64_t i, int64_t from, int64_t to) { combine(exchanged, t, i, from, to); },
            [&](int64_t i) { return out_.data + (t + i) * out_.stride; });
    }

    // `exchanged`: where the rows between the products lie whole, or results of pairs, where ranks share experts out.
    void products(Team& team, const Context& context, const Sorted& sorted, int64_t t, int64_t count, float* exchanged,
                  uint32_t& turn) const {
        const int64_t pairs = sorted.starts[num_own_], rows = one_preparation_ ? count : pairs * sets_;
        uint8_t* prepared = context.shared_scratch;
        if (rows <= few_rows_) {
            prepared = context.own_scratch + few_at_;
            prepare_rows(t, 0, rows, sorted, prepared, context.own_scratch);
        } else {
            for (int64_t first, last; team.next(4, rows, first, last);)
                prepare_rows(t, first, last, sorted, prepared, context.own_scratch);
            team.barrier();
        }
        auto* inner = reinterpret_cast<float*>(context.shared_scratch + inner_at_);
        first_products(team, context, sorted, pairs, prepared, inner);
        team.barrier();
        if (shared_) side_by_side(team, pairs, inner, exchanged, turn);
        const float* given = shared_ ? exchanged : inner;
        prepared = context.shared_scratch + prepared_at_;
        if (pairs <= few_pairs_) {
            prepared = context.own_scratch + few_inner_at_;
            prepare_inner(given, 0, pairs, sorted, prepared, context.own_scratch);
        } else {
            for (int64_t first, last; team.next(4, pairs, first, last);)
                prepare_inner(given, first, last, sorted, prepared, context.own_scratch);
            team.barrier();
        }
        last_product(team, context, sorted, t, count, prepared, apart_ ? exchanged : nullptr);
    }

    // What ranks have of the rows between the products, activated, to `whole` [pairs, full_]. Ends with a barrier.
    void side_by_side(Team& team, int64_t pairs, const float* inner, float* whole, uint32_t& turn) const {
        const int32_t start = shared_->columns.starts[size_t(shared_->exchange.rank)];
        shared_->columns.gather(
            team, shared_->exchange, turn, pairs,
            [&](int64_t row, int64_t from, int64_t to, float* piece) {
                float* own = whole + row * full_ + start + from;
                activated(inner, row, from, to, own);
                std::memcpy(piece, own, size_t(to - from) * 4);
            },
            [&](int64_t row) { return whole + row * full_; });
        team.barrier();
    }

    // Numbers from ... to-1 of a pair's row between the products, as the first of them left it.
    void activated(const float* inner, int64_t row, int64_t from, int64_t to, float* out) const {
        const float* x = inner + row * (split_ ? 2 * width_ : width_);
        if (!split_) {
            std::memcpy(out, x + from, size_t(to - from) * 4);
            return;
        }
        for (int64_t j = from; j < to; j += LANES) {
            const int rest = int(std::min<int64_t>(LANES, to - j));
            const F y = activate_gated(load(x + j, rest), load(x + width_ + j, rest), shape_.activation, shape_.limit);
            store(out + (j - from), y, rest);
        }
    }

    // Of each token, or of each pair where experts want their own: for gate, then for up, where these differ.
    void prepare_rows(int64_t t, int64_t first, int64_t last, const Sorted& sorted, uint8_t* to, uint8_t* scratch) const {
        auto* scaled = reinterpret_cast<float*>(scratch);
        auto* ordered = reinterpret_cast<float*>(scratch + ordered_at_);
        if (one_preparation_) {
            const Preparation p = up_[0].preparation();
            for (int64_t r = first; r < last; r++)
                p.row(in_.data + (t + r) * in_.stride, in_.width, ordered, to + r * row_bytes_);
            return;
        }
        const int64_t pairs = sorted.starts[num_own_];
        for (int64_t r = first; r < last; r++) {
            const int32_t pair = sorted.pairs[r % pairs];
            const int64_t token = t + pair / shape_.top_k, choice = pair % shape_.top_k;
            const float* x = in_.data + token * in_.stride;
            if (shape_.scale_input) {
                const F share = all(share_of(token, choice));
                for (int i = 0; i < in_.width; i += LANES) {
                    const int rest = in_.width - i;
                    if (rest >= LANES) store(scaled + i, load(x + i) * share);
                    else store(scaled + i, load(x + i, rest) * share, rest);
                }
                x = scaled;
            }
            up(own_of(token, choice), r / pairs).preparation().row(x, in_.width, ordered, to + r * row_bytes_);
        }
    }

    // What the first products gave of pairs first ... last-1, activated if they could not do it, for the last product.
    void prepare_inner(const float* inner, int64_t first, int64_t last, const Sorted& sorted, uint8_t* to,
                       uint8_t* scratch) const {
        auto* gated = reinterpret_cast<float*>(scratch);
        auto* ordered = reinterpret_cast<float*>(scratch + ordered_at_);
        int32_t i = 0;
        for (int64_t r = first; r < last; r++) {
            while (r >= sorted.starts[sorted.chosen[i] + 1]) i++;
            const float* x = inner + r * full_;
            if (split_ && !shared_) {
                activated(inner, r, 0, width_, gated);
                x = gated;
            }
            down_[size_t(sorted.chosen[i])].preparation().row(x, int32_t(full_), ordered, to + r * inner_bytes_);
        }
    }

    // Units are panels of an expert, its pairs' rows being gathered for a run of them.
    void first_products(Team& team, const Context& context, const Sorted& sorted, int64_t pairs, uint8_t* prepared,
                        float* inner) const {
        const int64_t each = up_[0].panels * (split_ ? 2 : 1), units = each * sorted.num_chosen;
        int64_t grain = std::max<int64_t>(1, units / (LONG_CLAIMS * team.size));
        if (pairs <= int64_t(FIRST_ROWS) * sorted.num_chosen)
            grain = std::max<int64_t>(1, std::min(CLAIM_BYTES / up_[0].panel_bytes, units / (CLAIMS * team.size)));
        grain = std::min(grain, each);
        PanelRun run{reinterpret_cast<float*>(context.own_scratch + tile_at_), context.own_scratch + unpacked_at_};
        Gathered gathered;
        for (int64_t first, last; team.next(grain, units, first, last);)
            for (int64_t unit = first; unit < last;) {
                const int64_t i = unit / each, from = unit % each, to = std::min(each, from + last - unit);
                panels(run, context, sorted, i, from, to, prepared, inner, gathered);
                unit += to - from;
            }
    }

    // Which rows lie in a thread's scratch.
    struct Gathered {
        int64_t first = -1, last = -1;
    };

    // Panels from ... to-1 of the i-th chosen expert.
    void panels(PanelRun& run, const Context& context, const Sorted& sorted, int64_t i, int64_t from, int64_t to,
                uint8_t* prepared, float* inner, Gathered& gathered) const {
        const int32_t expert = sorted.chosen[i], start = sorted.starts[expert], count = sorted.count(expert);
        const int64_t each = up_[0].panels, stride = split_ ? 2 * width_ : width_;
        for (int64_t at = 0; at < count; at += block_rows_) {
            const int rows = int(std::min<int64_t>(block_rows_, count - at));
            Rows block = rows_of(sorted, start + at, rows, prepared, context.own_scratch + gathered_at_, gathered);
            const uint8_t* of_up = block.data + (sets_ - 1) * sorted.starts[num_own_] * row_bytes_;
            for (int64_t p = from; p < to; p++) {
                const int64_t half = p / each, panel = p % each;
                const Segment& segment = up(expert, half);
                if (half) block.data = of_up;
                const bool many = segment.product->many && rows >= segment.product->many_rows;
                const int64_t column = panel * first_.width();
                const int width = int(std::min<int64_t>(first_.width(), width_ - column));
                float* out = inner + (start + at) * stride + half * width_ + column;
                Coming coming = ahead(sorted, i, p + 1, segment.panel_bytes, rows);
                run.multiply(
                    segment, panel, block, 0, rows, many, &coming,
                    [&](int64_t r, int some) {
                        for (int64_t j = r; some <= AWAITED_ROWS && j < r + some; j++)
                            for (int c = 0; c < width; c += 16) fetch_to_write(out + j * stride + c);
                    },
                    [&](int64_t r, int some, const float* tile) {
                        for (int j = 0; j < some; j++) {
                            float* row = out + (r + j) * stride;
                            first_.row(tile + j * PANEL, segment.bias(panel), row, row, width);
                        }
                    });
            }
        }
    }

    // Panel p of the i-th chosen expert, or the first one of the next, to be fetched while `rows` rows meet the one before.
    Coming ahead(const Sorted& sorted, int64_t i, int64_t p, int64_t bytes, int rows) const {
        const int64_t each = up_[0].panels;
        if (p == each * (split_ ? 2 : 1)) i++, p = 0;
        if (i == sorted.num_chosen) return {};
        const Segment& next = up(sorted.chosen[i], p / each);
        if (rows > FIRST_ROWS) return next.coming(p % each, bytes, rows);
        if (p % each == 0) next.warm(0);  // others lie behind the one before: the kernel reaches into them
        return {};
    }

    // Rows of `count` sorted pairs from `first` on.
    Rows rows_of(const Sorted& sorted, int64_t first, int count, uint8_t* prepared, uint8_t* room, Gathered& gathered) const {
        if (!one_preparation_) return {prepared + first * row_bytes_, row_bytes_, count};
        const int32_t k = shape_.top_k;
        if (count == 1) return {prepared + sorted.pairs[first] / k * row_bytes_, row_bytes_, 1};
        if (gathered.first != first || gathered.last != first + count) {
            for (int j = 0; j < count; j++)
                std::memcpy(room + j * row_bytes_, prepared + sorted.pairs[first + j] / k * row_bytes_, size_t(row_bytes_));
            gathered = {first, first + count};
        }
        return {room, row_bytes_, count};
    }

    // Units are panels of all experts, and blocks of tokens where panels are too few for the threads.
    // `results`: see add_panels.
    void last_product(Team& team, const Context& context, const Sorted& sorted, int64_t t, int64_t count,
                      uint8_t* prepared, float* results) const {
        const int64_t panels = down_[0].panels, pairs = sorted.starts[num_own_];
        int64_t blocks = 1, grain = 1;
        if (pairs <= int64_t(FIRST_ROWS) * sorted.num_chosen)
            grain = std::max<int64_t>(1, std::min(CLAIM_BYTES / (down_[0].panel_bytes * sorted.num_chosen),
                                                  panels / (CLAIMS * team.size)));
        else if (team.size > 1 && panels < LONG_CLAIMS * team.size)
            blocks = std::min(divided(LONG_CLAIMS * team.size, panels), pairs / (BLOCK_ROWS * sorted.num_chosen));
        const int64_t tokens = blocks > 1 ? divided(count, blocks) : count;
        blocks = divided(count, tokens);
        PanelRun run{reinterpret_cast<float*>(context.own_scratch + tile_at_), context.own_scratch + unpacked_at_};
        for (int64_t first, last; team.next(grain, panels * blocks, first, last);)
            for (int64_t unit = first; unit < last;) {
                const int64_t block = unit / panels, from = unit % panels, to = std::min(panels, from + last - unit);
                const int64_t begin = block * tokens, end = std::min(count, begin + tokens);
                for (int32_t i = 0; i < sorted.num_chosen; i++)
                    add_panels(run, sorted, i, from, to, t, begin, end, prepared, results);
                unit += to - from;
            }
    }

    // Panels from ... to-1 of the i-th chosen expert, for tokens t+begin ... t+end-1. `results` [pairs, columns]: where each
    // pair's stays by itself; null: they are added up.
    void add_panels(PanelRun& run, const Sorted& sorted, int32_t i, int64_t from, int64_t to, int64_t t, int64_t begin,
                    int64_t end, uint8_t* prepared, float* results) const {
        const int32_t expert = sorted.chosen[i], k = shape_.top_k;
        const int32_t* pairs = sorted.pairs + sorted.starts[expert];
        const int32_t* after = pairs + sorted.count(expert);
        const int32_t* of_begin = std::lower_bound(pairs, after, int32_t(begin * k));
        const int32_t* of_end = std::lower_bound(of_begin, after, int32_t(end * k));
        const Segment& segment = down_[size_t(expert)];
        for (; of_begin < of_end; of_begin += inner_rows_) {
            const int rows = int(std::min<int64_t>(inner_rows_, of_end - of_begin));
            const Rows block{prepared + (of_begin - sorted.pairs) * inner_bytes_, inner_bytes_, rows};
            const bool many = segment.product->many && rows >= segment.product->many_rows;
            for (int64_t p = from; p < to; p++) {
                const int64_t column = p * PANEL;
                const int width = int(std::min<int64_t>(PANEL, out_.width - column));
                Coming coming;
                if (p + 1 < to || i + 1 < sorted.num_chosen) {
                    const Segment& next = p + 1 < to ? segment : down_[size_t(sorted.chosen[i + 1])];
                    const int64_t panel = p + 1 < to ? p + 1 : from;
                    if (rows > FIRST_ROWS) coming = next.coming(panel, segment.panel_bytes, rows);
                    else if (p + 1 == to) next.warm(panel);
                }
                run.multiply(
                    segment, p, block, 0, rows, many, &coming,
                    [&](int64_t r, int some) {
                        for (int64_t j = r; some <= AWAITED_ROWS && j < r + some; j++)
                            for (int c = 0; c < width; c += 16)
                                fetch_to_write(row_of(t, of_begin[j], column, results) + c);
                    },
                    [&](int64_t r, int some, const float* tile) {
                        for (int j = 0; j < some; j++)
                            add(tile + j * PANEL, segment.bias(p), t, of_begin[r + j], column, width, results);
                    });
            }
        }
    }

    float* row_of(int64_t t, int32_t pair, int64_t column, float* results) const {
        if (results) return results + int64_t(pair) * out_.width + column;
        return out_.data + (t + pair / shape_.top_k) * out_.stride + column;
    }

    // One expert's result at a token: the first choice is the lowest id, so it is the first to come.
    void add(const float* sums, const float* bias, int64_t t, int32_t pair, int64_t column, int width, float* results) const {
        float* out = row_of(t, pair, column, results);
        if (results) {
            for (int j = 0; j < width; j += LANES) {
                const F y = bias ? load(sums + j) + load(bias + j) : load(sums + j);
                if (width - j >= LANES) store(out + j, y);
                else store(out + j, y, width - j);
            }
            return;
        }
        weigh(sums, bias, t + pair / shape_.top_k, pair % shape_.top_k, out, column, width);
    }

    // Results of a token's experts, each by itself in `results`, added as they are on one rank.
    void combine(const float* results, int64_t t, int64_t i, int64_t from, int64_t to) const {
        float* out = out_.data + (t + i) * out_.stride + from;
        for (int32_t choice = 0; choice < shape_.top_k; choice++)
            weigh(results + (i * shape_.top_k + choice) * out_.width + from, nullptr, t + i, choice, out, from, int(to - from));
    }

    // `width` numbers of one expert from `column` on, into what the token has there.
    void weigh(const float* sums, const float* bias, int64_t token, int64_t choice, float* out, int64_t column,
               int width) const {
        const float* to = choice ? out : adds_ ? residual_.data + token * residual_.stride + column : nullptr;
        const F share = all(shape_.scale_input ? 1.0f : share_of(token, choice));
        for (int j = 0; j < width; j += LANES) {
            const int rest = width - j;
            if (rest >= LANES) {
                const F y = bias ? load(sums + j) + load(bias + j) : load(sums + j);
                store(out + j, to ? fma(share, y, load(to + j)) : share * y);
            } else {
                const F y = bias ? load(sums + j, rest) + load(bias + j, rest) : load(sums + j, rest);
                store(out + j, to ? fma(share, y, load(to + j, rest)) : share * y, rest);
            }
        }
    }

    Shape shape_;
    std::vector<Segment> up_, down_;  // [num_own_], or twice as many if gate and up are two
    pst_register in_, routes_, residual_, out_;
    bool adds_;
    int64_t width_;  // numbers between the products that are made here
    int64_t full_;   // of them in all
    bool split_;     // gate and up are two matrices
    std::optional<Shared> shared_;
    std::optional<Apart> apart_;
    int32_t first_expert_, num_own_;  // experts that are here
    Epilogue first_;
    bool one_preparation_;  // rows are the same for all experts
    int64_t sets_ = 1;      // of rows of each pair, where they are not: 2 if gate and up want different ones
    int64_t row_bytes_ = 0, inner_bytes_ = 0;
    int64_t block_rows_, inner_rows_;  // rows of an expert that meet its panels at a time
    int64_t tokens_;                   // at a time
    int64_t few_rows_, few_pairs_;     // that every thread prepares for itself
    int64_t ordered_at_, tile_at_, unpacked_at_, sorted_at_, gathered_at_, few_at_, few_inner_at_,
        traffic_at_;                                   // in a thread's scratch
    int64_t inner_at_, prepared_at_, exchanged_at_;  // in everybody's
};

void check_matrices(const pst_matrix* matrices, int32_t count, int32_t rows, int32_t cols, int32_t pair) {
    for (int32_t i = 0; i < count; i++) {
        check_segment(matrices[i]);
        check(matrices[i].rows == rows && matrices[i].cols == cols && matrices[i].pair == pair,
              "experts have matrices of one shape");
    }
}

}  // namespace

OpPtr make_experts(const pst_op& op, const Maker& maker) {
    const auto *first = static_cast<const pst_matrix*>(op.p[0]), *second = static_cast<const pst_matrix*>(op.p[1]),
               *down = static_cast<const pst_matrix*>(op.p[2]);
    const pst_register &in = maker.reg(op.in[0]), &routes = maker.reg(op.in[1]), &out = maker.reg(op.out);
    const pst_register* residual = op.in[2] >= 0 ? &maker.reg(op.in[2]) : nullptr;
    const Experts::Shape shape{op.n[0], op.n[1], op.n[2] != 0, op.n[3], op.f[0]};
    check(first && down, "experts need matrices");
    check(shape.num_experts >= 1 && shape.num_experts < 1 << 24, "there is an expert, and ids are exact as floats");
    check(shape.top_k >= 1 && shape.top_k <= shape.num_experts, "a token chooses one expert at least");
    check(!first->pair || !second, "gate and up are a pair or two matrices");
    int32_t width = first->pair ? first->rows / 2 : first->rows, count = shape.num_experts;
    std::optional<Experts::Shared> shared;
    std::optional<Apart> apart;
    if (op.p[3]) {
        const auto& ranks = *static_cast<const pst_shared_experts*>(op.p[3]);
        check(ranks.exchange && !ranks.widths != !ranks.experts, "ranks have parts of all experts, or all of some");
        check_exchange(*ranks.exchange);
        if (ranks.widths) {
            shared.emplace(Experts::Shared{Exchange(*ranks.exchange), Columns(*ranks.exchange, ranks.widths)});
            check(width == ranks.widths[ranks.exchange->rank], "a rank makes its own columns");
            width = shared->columns.starts.back();
        } else {
            apart.emplace(*ranks.exchange, ranks.experts, shape.num_experts, out.width);
            count = apart->count;
        }
    }
    check_matrices(first, count, first->rows, in.width, first->pair);
    if (second) check_matrices(second, count, first->rows, in.width, 0);
    check_matrices(down, count, out.width, width, 0);
    const bool known = (shape.activation >= PST_SILU && shape.activation <= PST_QUICK_GELU) || is_clamped(shape.activation);
    check(known && (first->pair || second || !is_clamped(shape.activation)), "there is no such activation here");
    check(routes.width == 2 * shape.top_k, "routes are an id and a weight of every chosen expert");
    check(in.rows == out.rows && in.rows == routes.rows, "rows, routes and outputs are of one kind");
    const int64_t capacity = maker.capacity(in);
    check(!overlap(in, out, capacity) && !overlap(routes, out, capacity), "the output must not lie on the input");
    if (residual) {
        check(residual->width == out.width && residual->rows == out.rows, "what is added is as large as the output");
        check((residual->data == out.data && residual->stride == out.stride) || !overlap(*residual, out, capacity),
              "what is added is the output itself or lies elsewhere");
    }
    return std::make_unique<Experts>(first, second, down, shape, in, routes, residual, out, capacity, std::move(shared),
                                     std::move(apart));
}

}  // namespace pst
