// Ranks of several hosts: what is given in one host's memory goes to others through sockets, and back.
//
// Nobody has to say when a slot may be filled again. A rank fills its slot for gather t after it has seen everybody's
// t - 1. The ranks of another host gave their t - 1 after they had seen this rank's t - 2, so that had arrived there,
// whole: the slot of t - 2, which is the one of t, has been sent by then. On the other side a frame of t is read into the
// slot of t - 2. Its rank had seen everybody's t - 1, also those of the ranks there, who give t - 1 when they have done
// with t - 2: so nobody reads that slot any more.
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "exchange.h"

namespace pst {

namespace {

constexpr uint32_t MAGIC = 0x47545350;  // "PSTG"

struct Head {
    uint32_t magic;
    uint16_t version, rank;
    uint32_t turn, bytes;
};
static_assert(sizeof(Head) == PST_RELAY_HEAD, "a frame's head");

bool stopped(const pst_relay& relay) { return __atomic_load_n(&relay.stop, __ATOMIC_SEQ_CST) != 0; }
bool has(uint64_t ranks, int rank) { return ranks >> rank & 1; }
void count(uint64_t& frames, uint64_t& bytes, uint64_t more) {
    __atomic_fetch_add(&frames, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&bytes, more, __ATOMIC_RELAXED);
}

int32_t lost(pst_relay& relay) {
    if (stopped(relay)) return PST_END_STOPPED;
    relay.error = uint32_t(errno);
    return PST_END_LOST;
}

// 0, or how it ended.
int32_t send_all(pst_relay& relay, iovec* parts, size_t num) {
    while (num) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = num;
        ssize_t sent = sendmsg(relay.fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            return lost(relay);
        }
        for (; num && size_t(sent) >= parts->iov_len; parts++, num--) sent -= ssize_t(parts->iov_len);
        if (num) {
            parts->iov_base = static_cast<uint8_t*>(parts->iov_base) + sent;
            parts->iov_len -= size_t(sent);
        }
    }
    return 0;
}

// The same. Who waits for the beginning of a frame is awake for a while: gathers are some tens of microseconds apart.
int32_t receive_all(pst_relay& relay, void* to, size_t size, int64_t spin_ns) {
    auto* at = static_cast<uint8_t*>(to);
    const int64_t until = spin_ns ? now_ns() + spin_ns : 0;
    while (size) {
        const bool awake = spin_ns && now_ns() < until;
        const ssize_t got = recv(relay.fd, at, size, awake ? MSG_DONTWAIT : 0);
        if (got == 0) return stopped(relay) ? PST_END_STOPPED : PST_END_CLOSED;
        if (got < 0) {
            if (errno == EINTR || (awake && (errno == EAGAIN || errno == EWOULDBLOCK))) continue;
            return lost(relay);
        }
        at += got;
        size -= size_t(got);
    }
    return 0;
}

int32_t give(pst_relay& relay) {
    const Exchange exchange(*relay.exchange);
    for (uint32_t turn = 1;; turn++)
        for (int rank = 0; rank < exchange.size; rank++) {
            if (!has(relay.gives, rank)) continue;
            pst_rank_line& line = exchange.lines[rank];
            await(line.arrived, line.sleepers, turn, exchange.spin_ns, &relay.stop);
            if (!is_there(__atomic_load_n(&line.arrived, __ATOMIC_ACQUIRE), turn)) return PST_END_STOPPED;
            const uint64_t bytes = line.filled[turn & 1];
            if (bytes > uint64_t(exchange.slot_bytes)) return PST_END_LENGTH;
            Head head{MAGIC, PST_RELAY_VERSION, uint16_t(rank), turn, uint32_t(bytes)};
            iovec parts[2] = {{&head, sizeof(head)}, {exchange.slot(turn, rank), size_t(bytes)}};
            count(relay.given_frames, relay.given_bytes, sizeof(head) + bytes);
            if (const int32_t end = send_all(relay, parts, 2)) return end;
            if (stopped(relay)) return PST_END_STOPPED;
        }
}

int32_t take(pst_relay& relay) {
    const Exchange exchange(*relay.exchange);
    for (;;) {
        Head head;
        if (const int32_t end = receive_all(relay, &head, sizeof(head), exchange.spin_ns)) return end;
        if (head.magic != MAGIC) return PST_END_STRANGE;
        if (head.version != PST_RELAY_VERSION) return PST_END_VERSION;
        if (head.rank >= exchange.size || !has(relay.takes, head.rank)) return PST_END_RANK;
        const uint32_t had = __atomic_load_n(&exchange.lines[head.rank].arrived, __ATOMIC_RELAXED);
        if (head.turn != had + 1) return PST_END_TURN;
        if (head.bytes > uint64_t(exchange.slot_bytes)) return PST_END_LENGTH;
        if (const int32_t end = receive_all(relay, exchange.slot(head.turn, head.rank), head.bytes, 0)) return end;
        count(relay.taken_frames, relay.taken_bytes, sizeof(head) + head.bytes);
        exchange.count(head.rank, head.bytes * int64_t(exchange.size - 1));
        exchange.arrive(head.rank, head.turn, head.bytes);
    }
}

}  // namespace

}  // namespace pst

extern "C" int32_t pst_relay_give(pst_relay* relay) { return pst::give(*relay); }

extern "C" int32_t pst_relay_take(pst_relay* relay) { return pst::take(*relay); }

extern "C" void pst_relay_stop(pst_relay* relay) {
    __atomic_store_n(&relay->stop, 1, __ATOMIC_SEQ_CST);
    const pst::Exchange exchange(*relay->exchange);
    for (int rank = 0; rank < exchange.size; rank++) pst::wake(exchange.lines[rank].arrived);
}
