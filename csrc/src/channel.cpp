// PST_SEND, PST_RECEIVE: rows that a stage of a pipeline gives the next one, through a ring of slots that both have mapped.
//
// Each end has a counter of the pieces that it is done with. Who gives a piece waits for a free slot and for nothing else, so
// a stage goes on with other rows while the next one still works on the last ones.
#include <algorithm>
#include <cstring>

#include "ops.h"
#include "pieces.h"
#include "waiting.h"

namespace pst {

namespace {

static_assert(sizeof(pst_stage_channel_end) == 64 && 2 * sizeof(pst_stage_channel_end) == PST_CHANNEL_BYTES, "a line for each end");

struct Channel {
    pst_stage_channel_end &sender, &receiver;
    uint8_t* slots;
    uint32_t count;
    int64_t slot_bytes, spin_ns;

    Channel(const pst_stage_channel& c)
        : sender(static_cast<pst_stage_channel_end*>(c.memory)[0]), receiver(static_cast<pst_stage_channel_end*>(c.memory)[1]),
          slots(static_cast<uint8_t*>(c.memory) + PST_CHANNEL_BYTES), count(uint32_t(c.slots)), slot_bytes(c.slot_bytes),
          spin_ns(int64_t(c.spin_us) * 1000) {}

    float* slot(uint32_t turn) const { return reinterpret_cast<float*>(slots + int64_t(turn % count) * slot_bytes); }

    // Of the next piece of this end.
    static uint32_t turn(const pst_stage_channel_end& end) { return __atomic_load_n(&end.turn, __ATOMIC_RELAXED) + 1; }

    static void done(pst_stage_channel_end& end, uint32_t turn, int64_t bytes, int64_t waited) {
        end.pieces++;
        end.bytes += uint64_t(bytes);
        end.waited += uint64_t(waited);
        move_on(end.turn, end.sleepers, turn);
    }
};

struct Passing : Op {
    View view;
    pst_register shape;
    Channel channel;
    int64_t most;  // rows of a piece

    Passing(const pst_register& x, const pst_stage_channel& c) : view(x), shape(x), channel(c), most(c.slot_bytes / (x.width * 4)) {
        check(most > 0, "a slot holds a row at least");
    }
};

struct Send final : Passing {
    using Passing::Passing;

    void run(Team& team, const Context& context) const override {
        const int64_t rows = context.rows(shape), width = view.width;
        uint32_t turn = Channel::turn(channel.sender);
        for (int64_t first = 0; first < rows; first += most, turn++) {
            const int64_t count = std::min(most, rows - first);
            pst_stage_channel_end& other = channel.receiver;
            const int64_t waited = await(other.turn, other.sleepers, turn - channel.count, channel.spin_ns);
            float* slot = channel.slot(turn);
            each_run(team, count, width, [&](int64_t row, int64_t from, int64_t to) {
                std::memcpy(slot + row * width + from, view.row(first + row) + from, size_t(to - from) * 4);
            });
            team.barrier();
            if (team.id == 0) Channel::done(channel.sender, turn, count * width * 4, waited);
        }
    }
};

struct Receive final : Passing {
    using Passing::Passing;

    void run(Team& team, const Context& context) const override {
        const int64_t rows = context.rows(shape), width = view.width;
        uint32_t turn = Channel::turn(channel.receiver);
        for (int64_t first = 0; first < rows; first += most, turn++) {
            const int64_t count = std::min(most, rows - first);
            const int64_t waited = await(channel.sender.turn, channel.sender.sleepers, turn, channel.spin_ns);
            const float* slot = channel.slot(turn);
            each_run(team, count, width, [&](int64_t row, int64_t from, int64_t to) {
                std::memcpy(view.row(first + row) + from, slot + row * width + from, size_t(to - from) * 4);
            });
            team.barrier();
            if (team.id == 0) Channel::done(channel.receiver, turn, count * width * 4, waited);
        }
    }
};

}  // namespace

OpPtr make_passing(const pst_op& op, const Maker& maker) {
    check(op.p[0], "rows pass through a channel");
    const auto& channel = *static_cast<const pst_stage_channel*>(op.p[0]);
    check(channel.memory && channel.slots > 0 && (channel.slots & (channel.slots - 1)) == 0,
          "a channel has memory, and as many slots as a power of two");
    check(channel.slot_bytes >= 64 && channel.slot_bytes % 64 == 0, "slots are lines of the cache");
    if (op.kind == PST_SEND) return std::make_unique<Send>(maker.reg(op.in[0]), channel);
    return std::make_unique<Receive>(maker.reg(op.out), channel);
}

}  // namespace pst
