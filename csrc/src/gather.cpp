// PST_GATHER: what ranks have of a row, side by side on all of them, through memory that their processes share.
#include "exchange.h"

#include <algorithm>
#include <cstring>

#include "pieces.h"

namespace pst {

namespace {

struct Gather final : Op {
    View in, out;
    pst_register shape;
    Exchange exchange;
    std::vector<int32_t> starts;  // of each rank's columns, and the width
    int32_t widest = 0;

    Gather(const pst_register& x, const pst_register& y, const pst_exchange& e, const int32_t* widths)
        : in(x), out(y), shape(y), exchange(e), starts(1, 0) {
        for (int r = 0; r < e.size; r++) {
            check(widths[r] > 0, "every rank has some columns");
            starts.push_back(starts.back() + widths[r]);
            widest = std::max(widest, widths[r]);
        }
        check(x.rows == y.rows && x.width == widths[e.rank] && y.width == starts.back(),
              "a rank gives its columns, and gets all");
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
            exchange.await(turn);
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
    check_exchange(exchange);
    return std::make_unique<Gather>(maker.reg(op.in[0]), maker.reg(op.out), exchange,
                                    static_cast<const int32_t*>(op.p[1]));
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
