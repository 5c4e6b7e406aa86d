// PST_GATHER: what ranks have of a row, side by side on all of them, through memory that their processes share.
//
// Every rank has a line in that memory, where it says how many gathers it has filled its slot for, and two slots, which
// take turns. Who fills a slot for gather t has waited for everybody's t - 1, and they are done with t - 2 by then: so
// one wait is enough for each.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "pieces.h"
#include "waiting.h"

namespace pst {

namespace {

static_assert(sizeof(pst_rank_line) == 64, "a line of the cache for each rank");

struct Exchange {
    pst_rank_line* lines;
    uint8_t* slots;
    int rank, size;
    int64_t slot_bytes, spin_ns;

    Exchange(const pst_exchange& e)
        : lines(static_cast<pst_rank_line*>(e.memory)), slots(static_cast<uint8_t*>(e.memory) + PST_LINES_BYTES),
          rank(e.rank), size(e.size), slot_bytes(e.slot_bytes), spin_ns(int64_t(e.spin_us) * 1000) {}

    float* slot(uint32_t turn, int whose) const {
        return reinterpret_cast<float*>(slots + ((turn & 1) * size + whose) * slot_bytes);
    }
    // Of the next gather.
    uint32_t turn() const { return __atomic_load_n(&lines[rank].arrived, __ATOMIC_RELAXED) + 1; }

    void arrive(uint32_t turn) const { move_on(lines[rank].arrived, lines[rank].sleepers, turn); }

    // Nanoseconds until the others had arrived.
    int64_t await(uint32_t turn) const {
        int64_t waited = 0;
        for (int whose = 0; whose < size; whose++)
            if (whose != rank) waited += pst::await(lines[whose].arrived, lines[whose].sleepers, turn, spin_ns);
        return waited;
    }
    void count(int64_t bytes) const {
        lines[rank].gathers++;
        lines[rank].bytes += uint64_t(bytes);
    }
    void count_wait(int64_t waited) const { lines[rank].waited += uint64_t(waited); }
};

void check_exchange(const pst_exchange& e) {
    check(e.memory && e.size > 1 && e.size <= PST_MAX_RANKS, "ranks share memory, and there are at least two");
    check(e.rank >= 0 && e.rank < e.size, "a rank is one of them");
    check(e.slot_bytes >= 64 && e.slot_bytes % 64 == 0, "slots are lines of the cache");
}

struct Gather final : Op {
    View in, out;
    pst_register shape;
    Exchange exchange;
    std::vector<int32_t> starts;  // of each rank's columns, and the width
    int32_t widest = 0;

    Gather(const pst_register& x, const pst_register& y, const pst_exchange& e, const int32_t* widths)
        : in(x), out(y), shape(y), exchange(e), starts(1, 0) {
        for (int r = 0; r < e.size; r++) {
            check(widths[r] >= 0, "a rank has some columns or none");
            starts.push_back(starts.back() + widths[r]);
            widest = std::max(widest, widths[r]);
        }
        check(y.width == starts.back(), "a rank gets all columns");
        check(!widths[e.rank] || (x.rows == y.rows && x.width == widths[e.rank]), "a rank gives its columns");
        check(widest * 4 <= e.slot_bytes, "a slot holds a row at least");
    }

    void run(Team& team, const Context& context) const override {
        const int64_t rows = context.rows(shape), most = exchange.slot_bytes / (widest * 4);
        const int own = exchange.rank;
        uint32_t turn = exchange.turn();
        for (int64_t first = 0; first < rows; first += most, turn++) {
            const int64_t count = std::min(most, rows - first);
            const int32_t width = starts[size_t(own) + 1] - starts[size_t(own)];
            float* slot = exchange.slot(turn, own);
            each_run(team, count, width, [&](int64_t row, int64_t from, int64_t to) {
                const float* x = in.row(first + row) + from;
                std::memcpy(slot + row * width + from, x, size_t(to - from) * 4);
                std::memcpy(out.row(first + row) + starts[size_t(own)] + from, x, size_t(to - from) * 4);
            });
            team.barrier();
            if (team.id == 0) {
                exchange.count(count * width * 4 * (exchange.size - 1));
                exchange.arrive(turn);
            }
            const int64_t waited = exchange.await(turn);
            if (team.id == 0) exchange.count_wait(waited);
            for (int r = 0; r < exchange.size; r++) {
                if (r == own) continue;
                const int32_t theirs = starts[size_t(r) + 1] - starts[size_t(r)];
                const float* from_slot = exchange.slot(turn, r);
                each_run(team, count, theirs, [&](int64_t row, int64_t from, int64_t to) {
                    std::memcpy(out.row(first + row) + starts[size_t(r)] + from, from_slot + row * theirs + from,
                                size_t(to - from) * 4);
                });
            }
        }
    }
};

}  // namespace

OpPtr make_gather(const pst_op& op, const Maker& maker) {
    check(op.p[0] && op.p[1], "a gather has an exchange, and widths");
    const auto& exchange = *static_cast<const pst_exchange*>(op.p[0]);
    const auto* widths = static_cast<const int32_t*>(op.p[1]);
    check_exchange(exchange);
    const pst_register& given = maker.reg(widths[exchange.rank] ? op.in[0] : op.out);  // who has nothing reads nothing
    return std::make_unique<Gather>(given, maker.reg(op.out), exchange, widths);
}

}  // namespace pst

extern "C" int64_t pst_exchange_time(const pst_exchange* given, int64_t bytes, int32_t turns) {
    if (bytes < 4 || bytes > given->slot_bytes || turns < 1) return -1;
    pst::Exchange exchange(*given);
    std::vector<uint8_t> own(size_t(bytes), uint8_t(exchange.rank)), all(size_t(bytes) * size_t(exchange.size));
    int64_t began = 0;
    for (int32_t i = -16; i < turns; i++) {  // the first of them wake the others up
        if (i == 0) began = pst::now_ns();
        const uint32_t turn = exchange.turn();
        std::memcpy(exchange.slot(turn, exchange.rank), own.data(), size_t(bytes));
        exchange.arrive(turn);
        exchange.await(turn);
        for (int r = 0; r < exchange.size; r++)
            std::memcpy(all.data() + size_t(r) * size_t(bytes), exchange.slot(turn, r), size_t(bytes));
    }
    return pst::now_ns() - began;
}
