// PST_EXPERTS where every rank has whole experts: results go from who has the expert to who has the token, and what is
// made of them to all.
#pragma once

#include <vector>

#include "exchange.h"

namespace pst {

// The rows of a step that a rank combines: first ... last-1 of `count`.
struct OwnTokens {
    int64_t first, last;

    OwnTokens(int64_t count, int rank, int size) : first(count * rank / size), last(count * (rank + 1) / size) {}
    int64_t count() const { return last - first; }
};

// Which results of pairs (token * K + choice) a rank gives and gets, each list in order of pairs. All ranks route alike, so
// each knows where in whose slot its own lie.
struct Traffic {
    int32_t* given;  // [num_given] pairs
    int32_t* got;    // [num_got] pairs, from whom, and the how manieth of what that rank gives
    int32_t* from;
    int32_t* at;
    int64_t num_given = 0, num_got = 0;
    int64_t most = 0;  // that any rank gives
};

struct Apart {
    Exchange exchange;
    std::vector<int32_t> owner;  // [X] the rank that has an expert
    int32_t first = 0, count = 0;  // experts of this rank
    int32_t width;                 // of a result

    // `starts` [size + 1]. Throws Misfit unless every rank has an expert, and a slot holds a row.
    Apart(const pst_exchange& e, const int32_t* starts, int32_t num_experts, int32_t width)
        : exchange(e), width(width) {
        check(starts[0] == 0 && starts[e.size] == num_experts, "every expert is on one rank");
        for (int r = 0; r < e.size; r++) {
            check(starts[r] < starts[r + 1], "every rank has an expert");
            owner.insert(owner.end(), size_t(starts[r + 1] - starts[r]), r);
        }
        first = starts[e.rank];
        count = starts[e.rank + 1] - first;
        check(int64_t(width) * 4 <= e.slot_bytes, "a slot holds a row at least");
    }

    int64_t rows_of_slot() const { return exchange.slot_bytes / (int64_t(width) * 4); }
    static int64_t list_bytes(int64_t pairs) { return aligned(4 * 4 * pairs); }

    // `expert_of(token, choice)` of `count` tokens with `k` choices each.
    template <class ExpertOf>
    Traffic traffic(int64_t tokens, int32_t k, uint8_t* scratch, ExpertOf expert_of) const {
        auto* list = reinterpret_cast<int32_t*>(scratch);
        const int64_t pairs = tokens * k;
        Traffic t{list, list + pairs, list + 2 * pairs, list + 3 * pairs};
        int64_t given[PST_MAX_RANKS] = {};
        for (int to = 0; to < exchange.size; to++) {
            const OwnTokens theirs(tokens, to, exchange.size);
            for (int64_t token = theirs.first; token < theirs.last; token++)
                for (int32_t j = 0; j < k; j++) {
                    const int whose = owner[size_t(expert_of(token, j))];
                    if (whose == to) continue;
                    const int64_t at = given[whose]++;
                    const auto pair = int32_t(token * k + j);
                    if (whose == exchange.rank) t.given[t.num_given++] = pair;
                    if (to != exchange.rank) continue;
                    t.got[t.num_got] = pair;
                    t.from[t.num_got] = whose;
                    t.at[t.num_got++] = int32_t(at);
                }
        }
        t.most = *std::max_element(given, given + exchange.size);
        return t;
    }

    // `results` [pairs, width]: those of this rank's experts go to the ranks whose tokens they are, theirs come. Entered
    // behind a barrier; ends with one.
    void dispatch(Team& team, uint32_t& turn, const Traffic& t, float* results) const {
        const int64_t most = rows_of_slot();
        for (int64_t first = 0; first < t.most; first += most, turn++) {
            const int64_t give = std::max<int64_t>(0, std::min(most, t.num_given - first));
            float* slot = exchange.slot(turn, exchange.rank);
            each_run(team, give, width, [&](int64_t row, int64_t from, int64_t to) {
                const float* y = results + int64_t(t.given[first + row]) * width;
                std::copy(y + from, y + to, slot + row * width + from);
            });
            exchange.meet(team, turn, give * width * 4, give * width * 4);
            each_run(team, t.num_got, width, [&](int64_t i, int64_t from, int64_t to) {
                if (t.at[i] < first || t.at[i] >= first + most) return;
                const float* y = exchange.slot(turn, t.from[i]) + (t.at[i] - first) * width;
                std::copy(y + from, y + to, results + int64_t(t.got[i]) * width + from);
            });
        }
        team.barrier();
    }

    // `combine(token, from, to)` makes columns of an own token's row, which lies at `out(token)` on all ranks then.
    template <class Combine, class Out>
    void gather(Team& team, uint32_t& turn, int64_t tokens, Combine combine, Out out) const {
        const int64_t most = rows_of_slot(), longest = (tokens + exchange.size - 1) / exchange.size;
        const OwnTokens own(tokens, exchange.rank, exchange.size);
        for (int64_t first = 0; first < longest; first += most, turn++) {
            const int64_t give = std::max<int64_t>(0, std::min(most, own.count() - first));
            float* slot = exchange.slot(turn, exchange.rank);
            each_run(team, give, width, [&](int64_t row, int64_t from, int64_t to) {
                const int64_t token = own.first + first + row;
                combine(token, from, to);
                std::copy(out(token) + from, out(token) + to, slot + row * width + from);
            });
            exchange.meet(team, turn, give * width * 4, give * width * 4 * (exchange.size - 1));
            for (int r = 0; r < exchange.size; r++) {
                const OwnTokens theirs(tokens, r, exchange.size);
                if (r == exchange.rank) continue;
                const int64_t rows = std::max<int64_t>(0, std::min(most, theirs.count() - first));
                const float* y = exchange.slot(turn, r);
                each_run(team, rows, width, [&](int64_t row, int64_t from, int64_t to) {
                    std::copy(y + row * width + from, y + row * width + to, out(theirs.first + first + row) + from);
                });
            }
        }
    }
};

}  // namespace pst
