// PST_SCAN2 (Mamba-2), RECURRENT, WKV6, WKV7, DELTA, MLSTM: the rules of state_heads.h.
#include "activation.h"
#include "norm_row.h"
#include "state_heads.h"

namespace pst {

namespace {

int per_group(int heads, int groups) {
    check(groups > 0 && heads % groups == 0, "heads fall into equal groups");
    return heads / groups;
}

// What every rule is made of: heads, and the registers of a row. `sharing` heads in a row have one value.
struct Shape {
    View in, out;
    int heads, keys, width, sharing;

    Shape(const pst_op& op, const Maker& maker, int value, int sharing = 1)
        : in(maker.reg(op.in[value])), out(maker.reg(op.out)), heads(op.n[3]), keys(op.n[4]), width(op.n[5]),
          sharing(sharing) {
        check(heads > 0 && keys > 0 && width > 0, "a state has heads, keys and a width");
        check_tokens(maker.reg(op.in[value]), int64_t(heads / sharing) * width);
    }
    View input(const pst_op& op, const Maker& maker, int number, int64_t numbers) const {
        check_tokens(maker.reg(op.in[number]), numbers);
        return View(maker.reg(op.in[number]));
    }
    const float* fixed(const pst_op& op, int number) const {
        check(op.p[number] != nullptr, "a state's rule has weights");
        return static_cast<const float*>(op.p[number]);
    }
    // Number `column` of rows t ... t+count-1.
    static F gather(const View& x, int64_t t, int count, int64_t column) {
        alignas(64) float lanes[LANES] = {};
        for (int i = 0; i < count; i++) lanes[i] = x.row(t + i)[column];
        return load(lanes);
    }
};

struct Scan2 : Shape {
    static constexpr bool FINDS = false, ERASES = false, BEFORE = false;
    int per;
    View dt, b, c;
    const float *a, *d, *bias;
    float least, most;

    Scan2(const pst_op& op, const Maker& maker)
        : Shape(op, maker, 0), per(per_group(heads, op.n[6])), dt(input(op, maker, 1, heads)),
          b(input(op, maker, 2, int64_t(op.n[6]) * keys)), c(input(op, maker, 3, int64_t(op.n[6]) * keys)),
          a(fixed(op, 0)), d(fixed(op, 1)), bias(fixed(op, 2)), least(op.f[0]), most(op.f[1]) {}
    void batch(int64_t t, int count, int head, float (*numbers)[BATCH]) const {
        F step = cut(softplus(gather(dt, t, count, head) + all(bias[head])), least, most);
        store(numbers[0], exp(step * all(a[head])));
        store(numbers[1], step);
    }
    void row(int64_t t, int head, const float* numbers, Row& row) const {
        row.fade = numbers, row.fade_step = 0;
        row.scale = numbers[BATCH];
        row.write = b.row(t) + int64_t(head / per) * keys;
        row.read = c.row(t) + int64_t(head / per) * keys;
    }
    F value(const Row& row, F x, F) const { return x * all(row.scale); }
    F result(const Row&, int head, F x, F y) const { return fma(x, all(d[head]), y); }
};

struct Gated : Shape {
    static constexpr bool FINDS = false, ERASES = false, BEFORE = false;
    View q, k, decay;
    const float* fixed_decay;  // or null

    Gated(const pst_op& op, const Maker& maker)
        : Shape(op, maker, 2), q(input(op, maker, 0, int64_t(heads) * keys)),
          k(input(op, maker, 1, int64_t(heads) * keys)),
          decay(op.p[0] ? q : input(op, maker, 3, heads)), fixed_decay(static_cast<const float*>(op.p[0])) {}
    void batch(int64_t t, int count, int head, float (*numbers)[BATCH]) const {
        store(numbers[0], fixed_decay ? all(fixed_decay[head]) : sigmoid(gather(decay, t, count, head)));
    }
    void row(int64_t t, int head, const float* numbers, Row& row) const {
        row.fade = numbers, row.fade_step = 0;
        row.write = k.row(t) + int64_t(head) * keys;
        row.read = q.row(t) + int64_t(head) * keys;
    }
    F value(const Row&, F x, F) const { return x; }
    F result(const Row&, int, F, F y) const { return y; }
};

struct Wkv6 : Shape {
    static constexpr bool FINDS = false, ERASES = false, BEFORE = true;
    View r, k, w;
    const float *first, *decay;  // decay: or null

    Wkv6(const pst_op& op, const Maker& maker)
        : Shape(op, maker, 2), r(input(op, maker, 0, int64_t(heads) * keys)),
          k(input(op, maker, 1, int64_t(heads) * keys)),
          w(op.p[1] ? r : input(op, maker, 3, int64_t(heads) * keys)), first(fixed(op, 0)),
          decay(static_cast<const float*>(op.p[1])) {}
    void batch(int64_t, int, int, float (*)[BATCH]) const {}
    void row(int64_t t, int head, const float*, Row& row) const {
        const int64_t at = int64_t(head) * keys;
        F fit = all(0.0f);
        each_vector(keys, [&](int i, int lanes) {
            F key = load_part(k.row(t) + at + i, lanes) * load_part(first + at + i, lanes);
            fit = fma(load_part(r.row(t) + at + i, lanes), key, fit);
            if (decay) return;
            F slow = all(0.0f) - exp(load_part(w.row(t) + at + i, lanes));
            store_part(row.own + i, exp(slow), lanes);
        });
        row.scale = sum(fit);
        row.fade = decay ? decay + at : row.own, row.fade_step = 1;
        row.write = k.row(t) + at;
        row.read = r.row(t) + at;
    }
    F value(const Row&, F x, F) const { return x; }
    F result(const Row& row, int, F x, F y) const { return fma(all(row.scale), x, y); }
};

// RWKV-6 in a place of attention: no bonus, heads that share keys and values, keys that are as large as what fades.
struct Shared6 : Shape {
    static constexpr bool FINDS = false, ERASES = false, BEFORE = false;
    View r, k, w;
    float scale;

    Shared6(const pst_op& op, const Maker& maker)
        : Shape(op, maker, 2, per_group(op.n[3], op.n[6])), r(input(op, maker, 0, int64_t(heads) * keys)),
          k(input(op, maker, 1, int64_t(op.n[6]) * keys)), w(input(op, maker, 3, int64_t(heads) * keys)),
          scale(op.f[0]) {}
    void batch(int64_t, int, int, float (*)[BATCH]) const {}
    void row(int64_t t, int head, const float*, Row& row) const {
        const int64_t at = int64_t(head) * keys;
        const float* key = k.row(t) + int64_t(head / sharing) * keys;
        const int size = (keys + LANES - 1) / LANES * LANES;
        float *fades = row.own, *write = fades + size, *read = write + size;
        each_vector(keys, [&](int i, int lanes) {
            F fade = exp(all(0.0f) - exp(load_part(w.row(t) + at + i, lanes))), whole = load_part(key + i, lanes);
            store_part(fades + i, fade, lanes);
            store_part(write + i, whole - whole * fade, lanes);
            store_part(read + i, load_part(r.row(t) + at + i, lanes) * all(scale), lanes);
        });
        row.fade = fades, row.fade_step = 1;
        row.write = write, row.read = read;
    }
    F value(const Row&, F x, F) const { return x; }
    F result(const Row&, int, F, F y) const { return y; }
};

struct Wkv7 : Shape {
    static constexpr bool FINDS = true, ERASES = true, BEFORE = false;
    View r, w, k, removal, rate;

    Wkv7(const pst_op& op, const Maker& maker)
        : Shape(op, maker, 3), r(own(op, maker, 0)), w(own(op, maker, 1)), k(own(op, maker, 2)),
          removal(own(op, maker, 4)), rate(own(op, maker, 5)) {}
    View own(const pst_op& op, const Maker& maker, int number) const {
        return input(op, maker, number, int64_t(heads) * keys);
    }
    void batch(int64_t, int, int, float (*)[BATCH]) const {}
    void row(int64_t t, int head, const float*, Row& row) const {
        int64_t at = int64_t(head) * keys;
        float *fade = row.own, *erase = row.own + padded(keys);
        each_vector(keys, [&](int i, int lanes) {
            F slow = sigmoid(load_part(w.row(t) + at + i, lanes)) * all(-0.606530660f);  // -e^-0.5
            store_part(fade + i, exp(slow), lanes);
            F removed = load_part(removal.row(t) + at + i, lanes);
            store_part(erase + i, all(0.0f) - removed * load_part(rate.row(t) + at + i, lanes), lanes);
        });
        row.fade = fade, row.fade_step = 1;
        row.erase = erase;
        row.find = removal.row(t) + at;
        row.write = k.row(t) + at;
        row.read = r.row(t) + at;
    }
    F value(const Row&, F x, F) const { return x; }
    F result(const Row&, int, F, F y) const { return y; }
    static int padded(int n) { return (n + LANES - 1) / LANES * LANES; }
};

struct Delta : Shape {
    static constexpr bool FINDS = true, ERASES = false, BEFORE = false;
    int groups, per;
    View q, k, dt, beta;
    const float* a;
    float eps, factor, least, scale;
    bool by_key, in_turn;

    Delta(const pst_op& op, const Maker& maker)
        : Shape(op, maker, 2), groups(op.n[6]), per(per_group(heads, groups)),
          q(input(op, maker, 0, int64_t(groups) * keys)), k(input(op, maker, 1, int64_t(groups) * keys)),
          dt(maker.reg(op.in[3])), beta(input(op, maker, 4, heads)), a(fixed(op, 0)), eps(op.f[0]), factor(op.f[1]),
          least(op.f[2]), scale(1.0f / std::sqrt(float(keys))), by_key(dt.width != heads), in_turn(op.n[7] != 0) {
        check_tokens(maker.reg(op.in[3]), by_key ? int64_t(heads) * keys : heads);
    }
    void batch(int64_t t, int count, int head, float (*numbers)[BATCH]) const {
        if (!by_key) store(numbers[0], fading(gather(dt, t, count, head), head));
        store(numbers[1], sigmoid(gather(beta, t, count, head)) * all(factor));
    }
    void row(int64_t t, int head, const float* numbers, Row& row) const {
        int size = Wkv7::padded(keys);
        int64_t at = int64_t(in_turn ? head % groups : head / per) * keys;
        float *read = row.own, *write = read + size, *find = write + size, *fades = find + size;
        const float by_q = of_unit(q.row(t) + at) * scale, by_k = of_unit(k.row(t) + at);
        const float* decay = dt.row(t) + int64_t(head) * keys;
        each_vector(keys, [&](int i, int lanes) {
            F fade = all(*numbers), unit = load_part(k.row(t) + at + i, lanes) * all(by_k);
            if (by_key) {
                fade = fading(load_part(decay + i, lanes), head);
                store_part(fades + i, fade, lanes);
            }
            store_part(read + i, load_part(q.row(t) + at + i, lanes) * all(by_q), lanes);
            store_part(write + i, unit, lanes);
            store_part(find + i, unit * fade, lanes);
        });
        row.fade = by_key ? fades : numbers, row.fade_step = by_key;
        row.scale = numbers[BATCH];
        row.read = read, row.write = write, row.find = find;
    }
    F fading(F step, int head) const {
        return least < 0 ? exp(sigmoid(step * all(a[head])) * all(least)) : exp(softplus(step) * all(a[head]));
    }
    float of_unit(const float* x) const {
        F total = all(0.0f);
        each_vector(keys, [&](int i, int lanes) {
            F v = load_part(x + i, lanes);
            total = fma(v, v, total);
        });
        return 1.0f / std::sqrt(sum(total) + eps);
    }
    F value(const Row& row, F x, F found) const { return (x - found) * all(row.scale); }
    F result(const Row&, int, F, F y) const { return y; }
};

// What is not linear in it is PST_MLSTM_GATES' (state_mlstm.cpp).
struct Mlstm : Shape {
    static constexpr bool FINDS = false, ERASES = false, BEFORE = false;
    View q, k, gates;

    Mlstm(const pst_op& op, const Maker& maker)
        : Shape(op, maker, 2), q(input(op, maker, 0, int64_t(heads) * keys)),
          k(input(op, maker, 1, int64_t(heads) * keys)), gates(input(op, maker, 3, int64_t(3) * heads)) {}
    void batch(int64_t t, int count, int head, float (*numbers)[BATCH]) const {
        store(numbers[0], gather(gates, t, count, head));
        store(numbers[1], gather(gates, t, count, heads + head));
    }
    void row(int64_t t, int head, const float* numbers, Row& row) const {
        row.fade = numbers, row.fade_step = 0;
        row.scale = numbers[BATCH];
        row.own[0] = gates.row(t)[2 * heads + head];
        row.write = k.row(t) + int64_t(head) * keys;
        row.read = q.row(t) + int64_t(head) * keys;
    }
    F value(const Row& row, F x, F) const { return x * all(row.scale); }
    F result(const Row& row, int, F, F y) const { return y * all(row.own[0]); }
};

}  // namespace

OpPtr make_heads(const pst_op& op, const Maker& maker) {
    switch (op.kind) {
        case PST_SCAN2: return std::make_unique<Heads<Scan2>>(op, maker);
        case PST_RECURRENT: return std::make_unique<Heads<Gated>>(op, maker);
        case PST_WKV6:
            if (op.p[0]) return std::make_unique<Heads<Wkv6>>(op, maker);
            return std::make_unique<Heads<Shared6>>(op, maker);
        case PST_WKV7: return std::make_unique<Heads<Wkv7>>(op, maker);
        case PST_MLSTM: return std::make_unique<Heads<Mlstm>>(op, maker);
        default: return std::make_unique<Heads<Delta>>(op, maker);
    }
}

}  // namespace pst
