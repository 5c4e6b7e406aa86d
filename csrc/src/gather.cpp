// PST_GATHER: what ranks have of a row, side by side on all of them. See exchange.h.
#include <cstring>

#include "exchange.h"

namespace pst {

void check_exchange(const pst_exchange& e) {
    check(e.memory && e.size > 1 && e.size <= PST_MAX_RANKS, "ranks share memory, and there are at least two");
    check(e.rank >= 0 && e.rank < e.size, "a rank is one of them");
    check(e.slot_bytes >= 64 && e.slot_bytes % 64 == 0, "slots are lines of the cache");
}

Columns::Columns(const pst_exchange& e, const int32_t* widths) : starts(1, 0) {
    for (int r = 0; r < e.size; r++) {
        check(widths[r] >= 0, "a rank has some columns or none");
        starts.push_back(starts.back() + widths[r]);
        widest = std::max(widest, widths[r]);
    }
    check(widest > 0 && int64_t(widest) * 4 <= e.slot_bytes, "a slot holds a row at least");
}

namespace {

struct Gather final : Op {
    View in, out;
    pst_register shape;
    Exchange exchange;
    Columns columns;

    Gather(const pst_register& x, const pst_register& y, const pst_exchange& e, const int32_t* widths)
        : in(x), out(y), shape(y), exchange(e), columns(e, widths) {
        check(y.width == columns.starts.back(), "a rank gets all columns");
        check(!widths[e.rank] || (x.rows == y.rows && x.width == widths[e.rank]), "a rank gives its columns");
    }

    void run(Team& team, const Context& context) const override {
        uint32_t turn = exchange.turn();
        const int32_t start = columns.starts[size_t(exchange.rank)];
        columns.gather(
            team, exchange, turn, context.rows(shape),
            [&](int64_t row, int64_t from, int64_t to, float* piece) {
                const float* x = in.row(row) + from;
                std::memcpy(piece, x, size_t(to - from) * 4);
                std::memcpy(out.row(row) + start + from, x, size_t(to - from) * 4);
            },
            [&](int64_t row) { return out.row(row); });
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
        exchange.arrive(exchange.rank, turn, bytes);
        exchange.await(turn);
        for (int r = 0; r < exchange.size; r++)
            std::memcpy(all.data() + size_t(r) * size_t(bytes), exchange.slot(turn, r), size_t(bytes));
    }
    return pst::now_ns() - began;
}
