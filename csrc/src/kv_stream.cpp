// Keys or values of a block as a stream of bits: pst_kv_encode, pst_kv_decode.
//
// Of one head's tokens a step is derived, its numbers become whole ones in steps, and what is sent of each channel is how
// far a token is from what the ones before it let expect: by one of three rules and one of 16 tables, whichever channel
// needs fewest bits by. Numbers are written by range coding with tables (rANS), four streams in turn. Nothing but whole
// numbers decides a bit, so every processor reads what another has written.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "rounding.h"
#include "simd.h"

namespace pst {

namespace {

constexpr int BITS = 12, TOTAL = 1 << BITS;  // frequencies of a table add up to it
constexpr int TABLES = 16, SYMBOLS = 64, ESCAPE = SYMBOLS - 1, STREAMS = 4, RULES = 3, FAR = 256;
constexpr uint32_t LOWEST = 1u << 16;  // a stream's state is never less between two symbols
constexpr int MOST = 16000;            // steps: what has to be written of two may be twice as much
constexpr int MOST_TOKENS = 4096;

struct Slot {
    uint16_t start, count;
};

// What the lowest bits of a state stand for: the symbol, how often it is, and how far it is into its slot.
struct Found {
    uint32_t bits;

    int symbol() const { return int(bits & 255); }
    uint32_t count() const { return bits >> 8 & (TOTAL - 1); }
    uint32_t rest() const { return bits >> 20; }
};

// How many bits a number has: 0 for 0.
inline int length(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

inline uint32_t folded(int32_t x) { return (uint32_t(x) << 1) ^ uint32_t(x >> 31); }
inline int32_t unfolded(uint32_t x) { return int32_t(x >> 1) ^ -int32_t(x & 1); }

// Table k is of numbers whose mean size is around 2^((k - 7) / 2): normal ones, and a tenth of a wider kind. Made of sums,
// products and quotients alone, which are the same on every machine.
struct Tables {
    Slot slots[TABLES][SYMBOLS];
    Found found[TABLES][TOTAL];

    Tables() {
        double mean = 0.08838834764831845;  // 2^-3.5
        for (int k = 0; k < TABLES; k++, mean *= 1.4142135623730951) make(k, mean);
    }
    void make(int k, double mean) {
        // Mean size of whole numbers whose spread is s: found by trying, since small ones have nearly none.
        double low = 0.05, high = 64, p[SYMBOLS];
        for (int turn = 0; turn < 40; turn++) {
            double middle = (low + high) / 2;
            (weights(middle, p) < mean ? low : high) = middle;
        }
        weights(low, p);
        int counts[SYMBOLS], left = TOTAL, most = 0;
        for (int i = 0; i < SYMBOLS; i++) {
            counts[i] = 1 + int(p[i] * (TOTAL - SYMBOLS));
            left -= counts[i];
            if (counts[i] > counts[most]) most = i;
        }
        counts[most] += left;
        int start = 0;
        for (int i = 0; i < SYMBOLS; i++) {
            slots[k][i] = {uint16_t(start), uint16_t(counts[i])};
            for (int rest = 0; rest < counts[i]; rest++)
                found[k][start + rest] = {uint32_t(i) | uint32_t(counts[i]) << 8 | uint32_t(rest) << 20};
            start += counts[i];
        }
    }
    // p [SYMBOLS] of folded numbers; the last is for all that are larger. Returns the mean size.
    static double weights(double spread, double* p) {
        double ratio = power_of_e(0.5 / (spread * spread)), square = ratio * ratio, step = ratio;
        double wide = power_of_e(0.5 / spread), normals[FAR], tails[FAR], normal_sum = 1, tail_sum = 1, mean = 0;
        normals[0] = tails[0] = 1;  // by size
        for (int size = 1; size < FAR; size++, step *= square) {
            normal_sum += 2 * (normals[size] = normals[size - 1] * step);
            tail_sum += 2 * (tails[size] = tails[size - 1] * wide);
        }
        std::fill(p, p + SYMBOLS, 0);
        for (int i = 0; i < 2 * FAR - 1; i++) {
            int size = (i + 1) / 2;
            double share = 0.9 * normals[size] / normal_sum + 0.1 * tails[size] / tail_sum;
            p[std::min(i, ESCAPE)] += share;
            mean += share * size;
        }
        return mean;
    }
    // e^-x without a library, whose last digit may differ.
    static double power_of_e(double x) {
        int halvings = 0;
        while (x > 0.01) x /= 2, halvings++;
        double term = 1, sum = 1;
        for (int i = 1; i < 12; i++) term *= -x / i, sum += term;
        while (halvings--) sum *= sum;
        return sum;
    }
};

const Tables& tables() {
    static const Tables made;
    return made;
}

// Frequencies of 16 symbols that follow what was seen.
struct Adapting {
    uint16_t bounds[17];

    Adapting() {
        for (int i = 0; i <= 16; i++) bounds[i] = uint16_t(i * (TOTAL / 16));
    }
    Slot of(int symbol) const {
        return {bounds[symbol], uint16_t(bounds[symbol + 1] - bounds[symbol])};
    }
    int find(uint32_t at) const {
        int symbol = 0;
        while (bounds[symbol + 1] <= at) symbol++;
        return symbol;
    }
    void saw(int symbol) {
        for (int i = 1; i < 16; i++) {
            int goal = i <= symbol ? i * 4 : TOTAL - 4 * (16 - i);  // no symbol becomes impossible
            bounds[i] = uint16_t(bounds[i] + (goal - bounds[i]) / 32);
        }
    }
};

// What both directions keep of a plane. What a channel has is expected from the one before.
struct Models {
    Adapting table[TABLES + 1], rule[RULES + 1], first[17], escaped;
};

// Its symbols in the order of decoding; they are written from the last one to the first. A channel's token t is in stream
// t % 4, all else in the first.
class Writer {
  public:
    void put(Slot slot, int stream = 0) { pieces_.push_back({slot, stream}); }
    void adapt(Adapting& model, int symbol) {
        put(model.of(symbol));
        model.saw(symbol);
    }
    // The lowest `count` bits as they are.
    void plain(uint32_t x, int count) {
        for (; count > 0; count -= 8, x >>= 8) {
            int part = std::min(count, 8);
            uint32_t low = x & ((1u << part) - 1);
            put({uint16_t(low << (BITS - part)), uint16_t(1 << (BITS - part))});
        }
    }
    // A number of `length(x)` bits, of which the first is known.
    void below(uint32_t x) {
        int count = length(x) - 1;
        if (count > 0) plain(x & ((1u << count) - 1), count);
    }
    // How many bytes it takes, or -1 if there are fewer.
    int64_t finish(uint8_t* out, int64_t size) const {
        std::vector<uint16_t> words;
        words.reserve(pieces_.size() / 2);
        uint32_t states[STREAMS];
        std::fill(states, states + STREAMS, LOWEST);
        for (size_t i = pieces_.size(); i-- > 0;) {
            const Slot slot = pieces_[i].slot;
            uint32_t& state = states[pieces_[i].stream];
            if (uint64_t(state) >= uint64_t(slot.count) << (32 - BITS)) {
                words.push_back(uint16_t(state));
                state >>= 16;
            }
            state = (state / slot.count << BITS) + state % slot.count + slot.start;
        }
        int64_t bytes = int64_t(sizeof states + words.size() * 2);
        if (bytes > size) return -1;
        std::memcpy(out, states, sizeof states);
        std::reverse(words.begin(), words.end());
        std::memcpy(out + sizeof states, words.data(), words.size() * 2);
        return bytes;
    }

  private:
    struct Piece {
        Slot slot;
        int stream;
    };
    std::vector<Piece> pieces_;
};

// May read on for a while behind the end, where zeros are: whoever reads asks `past` after every channel.
class Reader {
  public:
    Reader(const uint8_t* in, int64_t size) : data_(size_t(size) / 2 + AHEAD) {
        if (size < int64_t(sizeof states_) || size % 2) return;
        std::memcpy(states_, in, sizeof states_);
        std::memcpy(data_.data(), in + sizeof states_, size_t(size) - sizeof states_);
        at_ = data_.data();
        end_ = at_ + (size_t(size) - sizeof states_) / 2;
    }
    bool past() const { return at_ > end_ || !at_; }

    int adapt(Adapting& model) {
        uint32_t low = states_[0] & (TOTAL - 1);
        int symbol = model.find(low);
        Slot slot = model.of(symbol);
        take(states_[0], at_, slot.count, low - slot.start);
        model.saw(symbol);
        return symbol;
    }
    uint32_t plain(int count) {
        uint32_t x = 0;
        for (int shift = 0; count > 0; count -= 8, shift += 8) {
            int part = std::min(count, 8);
            uint32_t low = states_[0] & (TOTAL - 1), whole = low >> (BITS - part);
            take(states_[0], at_, 1u << (BITS - part), low & ((1u << (BITS - part)) - 1));
            x |= whole << shift;
        }
        return x;
    }
    uint32_t below(int length) { return length > 1 ? plain(length - 1) | 1u << (length - 1) : uint32_t(length); }

    // Symbols of tokens 1 to `tokens`, each in the stream of its token.
    void tokens(int table, int tokens, uint8_t* out) {
        const Found* found = tables().found[table];
        uint32_t a = states_[1], b = states_[2], c = states_[3], d = states_[0];
        const uint16_t* at = at_;
        auto one = [&](uint32_t& state) {
            Found now = found[state & (TOTAL - 1)];
            take(state, at, now.count(), now.rest());
            return uint8_t(now.symbol());
        };
        int t = 1;
        for (; t + 3 < tokens; t += 4) {
            out[t] = one(a);
            out[t + 1] = one(b);
            out[t + 2] = one(c);
            out[t + 3] = one(d);
        }
        states_[1] = a, states_[2] = b, states_[3] = c, states_[0] = d;
        for (; t < tokens; t++) out[t] = one(states_[t % STREAMS]);
        at_ = at;
    }
    // Everything was read, and every stream ended where it began.
    bool done() const {
        return at_ == end_ && at_ && std::all_of(states_, states_ + STREAMS, [](uint32_t s) { return s == LOWEST; });
    }

  private:
    static constexpr size_t AHEAD = 4 * MOST_TOKENS;  // words: more than a channel can take

    static void take(uint32_t& state, const uint16_t*& at, uint32_t count, uint32_t rest) {
        uint32_t next = count * (state >> BITS) + rest, more = next << 16 | *at;
        bool low = next < LOWEST;
        state = low ? more : next;
        at += low;
    }
    uint32_t states_[STREAMS] = {};
    std::vector<uint16_t> data_;
    const uint16_t *at_ = nullptr, *end_ = nullptr;
};

// What the tokens before let expect of the next one, in 256ths: the last one, a mean that forgets, or the mean.
struct Expected {
    int rule, seen = 0;
    int32_t at = 0;

    explicit Expected(int rule) : rule(rule) {}
    void saw(int32_t x) {
        static const int WEIGHTS[2] = {256, 102};
        seen++;
        int32_t weight = seen == 1 ? 256 : rule < 2 ? WEIGHTS[rule] : 256 / seen;
        at += int32_t((int64_t(x) * 256 - at) * weight >> 8);
    }
    int32_t next() const { return (at + 128) >> 8; }
};

// The table for `count` numbers whose sizes add up to `sum`.
int table_of(int64_t sum, int64_t count) {
    // Borders are half way, in thousandths: 1000 * 2^((k - 6.5) / 2).
    static const int32_t BORDERS[TABLES - 1] = {105,  149,  210,  297,  420,  595,   841,  1189,
                                                1682, 2378, 3364, 4757, 6727, 9514, 13454};
    int64_t mean = sum * 1000 / std::max<int64_t>(1, count);
    int k = 0;
    while (k < TABLES - 1 && mean > BORDERS[k]) k++;
    return k;
}

struct Shape {
    int32_t dtype, layers, tokens, heads, dim;

    bool good() const {
        return dtype >= PST_F32 && dtype <= PST_BF16 && layers > 0 && tokens > 0 && tokens <= MOST_TOKENS && heads > 0 &&
               dim > 0 && dim <= 65536;
    }
    size_t width() const { return dtype == PST_F32 ? 4 : 2; }
    size_t place(int layer, int token, int head) const {
        return ((size_t(layer) * tokens + token) * heads + head) * dim * width();
    }
};

void read_row(const uint8_t* from, int32_t dtype, int n, float* to) {
    if (dtype == PST_F32) {
        std::memcpy(to, from, size_t(n) * 4);
        return;
    }
    for (int i = 0; i < n; i++) {
        uint16_t x;
        std::memcpy(&x, from + 2 * i, 2);
        to[i] = dtype == PST_BF16 ? bf16_to_f32(x) : f16_to_f32(x);
    }
}

// No NaN is among them.
void write_row(const float* from, int32_t dtype, int n, uint8_t* to) {
    if (dtype == PST_F32) {
        std::memcpy(to, from, size_t(n) * 4);
        return;
    }
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        uint16_t x = dtype == PST_F16 ? f32_to_f16(from[i]) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        std::memcpy(to + 2 * i, &x, 2);
    }
}

// How large a step is for a head's tokens x [tokens, dim]: `bin` quarters of the median channel's range. NaN if a number is
// not finite; 0 if all are 0.
float step_of(const float* x, int tokens, int dim, float bin, std::vector<float>& ranges) {
    ranges.resize(size_t(dim));
    float most = 0;
    bool sick = false;
    for (int c = 0; c < dim; c++) {
        float low = x[c], high = x[c];
        for (int t = 0; t < tokens; t++) {
            float value = x[size_t(t) * dim + c];
            sick |= !std::isfinite(value);
            low = std::min(low, value);
            high = std::max(high, value);
        }
        ranges[size_t(c)] = high - low;
        most = std::max(most, std::max(high, -low));
    }
    if (sick) return NAN;
    std::nth_element(ranges.begin(), ranges.begin() + dim / 2, ranges.end());
    float step = ranges[size_t(dim / 2)] * (bin * 0.25f);
    return std::max(step, most / float(MOST));
}

}  // namespace

}  // namespace pst

extern "C" int64_t pst_kv_encode(const void* x, int32_t dtype, int32_t layers, int32_t tokens, int32_t heads, int32_t dim,
                                 const float* bins, uint8_t* out, int64_t size) {
    using namespace pst;
    const Shape shape{dtype, layers, tokens, heads, dim};
    if (!shape.good()) return -1;
    PlainRounding plain;
    int64_t steps_bytes = int64_t(layers) * heads * 4;
    if (size < steps_bytes) return -1;
    Writer writer;
    Models models;
    std::vector<float> values(size_t(tokens) * dim), ranges;
    std::vector<int32_t> whole(size_t(tokens) * dim), rest(size_t(RULES) * tokens);
    int table = TABLES, rule = RULES, first = 16;
    for (int layer = 0; layer < layers; layer++)
        for (int head = 0; head < heads; head++) {
            for (int t = 0; t < tokens; t++)
                read_row(static_cast<const uint8_t*>(x) + shape.place(layer, t, head), dtype, dim, &values[size_t(t) * dim]);
            float step = step_of(values.data(), tokens, dim, bins[layer], ranges);
            std::memcpy(out + (int64_t(layer) * heads + head) * 4, &step, 4);
            for (int t = 0; t < tokens; t++)
                for (int c = 0; c < dim; c++) {
                    float q = step > 0 ? std::nearbyint(values[size_t(t) * dim + c] / step) : 0;
                    whole[size_t(c) * tokens + t] = int32_t(std::min(std::max(q, -float(MOST)), float(MOST)));
                }
            for (int c = 0; c < dim; c++) {
                const int32_t* own = &whole[size_t(c) * tokens];
                int best = 0;
                int64_t least = 0;
                for (int r = 0; r < RULES; r++) {
                    Expected expected(r);
                    int64_t sum = 0;
                    for (int t = 1; t < tokens; t++) {
                        expected.saw(own[t - 1]);
                        int32_t off = own[t] - expected.next();
                        rest[size_t(r) * tokens + t] = off;
                        sum += std::abs(off);
                    }
                    if (!r || sum < least) best = r, least = sum;
                }
                const int32_t* off = &rest[size_t(best) * tokens];
                int k = table_of(least, tokens - 1);
                uint32_t begin = folded(own[0]);
                writer.adapt(models.table[table], k);
                writer.adapt(models.rule[rule], best);
                writer.adapt(models.first[first], length(begin));
                writer.below(begin);
                table = k, rule = best, first = length(begin);
                for (int t = 1; t < tokens; t++)
                    writer.put(tables().slots[k][std::min<uint32_t>(folded(off[t]), ESCAPE)], t % STREAMS);
                for (int t = 1; t < tokens; t++) {
                    if (folded(off[t]) < ESCAPE) continue;
                    uint32_t more = folded(off[t]) - (ESCAPE - 1);
                    writer.adapt(models.escaped, length(more) - 1);
                    writer.below(more);
                }
            }
        }
    int64_t bytes = writer.finish(out + steps_bytes, size - steps_bytes);
    return bytes < 0 ? -1 : steps_bytes + bytes;
}

extern "C" int32_t pst_kv_decode(const uint8_t* in, int64_t size, int32_t dtype, int32_t layers, int32_t tokens,
                                 int32_t heads, int32_t dim, void* x) {
    using namespace pst;
    const Shape shape{dtype, layers, tokens, heads, dim};
    if (!shape.good()) return -1;
    PlainRounding plain;
    int64_t steps_bytes = int64_t(layers) * heads * 4;
    if (size < steps_bytes) return -1;
    Reader reader(in + steps_bytes, size - steps_bytes);
    if (reader.past()) return -1;
    Models models;
    std::vector<float> values(size_t(tokens) * dim);
    std::vector<uint8_t> symbols(size_t(tokens) + STREAMS);
    int table = TABLES, rule = RULES, first = 16;
    for (int layer = 0; layer < layers; layer++)
        for (int head = 0; head < heads; head++) {
            float step;
            std::memcpy(&step, in + (int64_t(layer) * heads + head) * 4, 4);
            for (int c = 0; c < dim; c++) {
                table = reader.adapt(models.table[table]);
                rule = reader.adapt(models.rule[rule]);
                if (rule >= RULES) return -1;
                first = reader.adapt(models.first[first]);
                int32_t whole = unfolded(reader.below(first));
                reader.tokens(table, tokens, symbols.data());
                Expected expected(rule);
                values[size_t(c)] = float(whole) * step;
                for (int t = 1; t < tokens; t++) {
                    uint32_t off = symbols[size_t(t)];
                    if (off == ESCAPE) off += reader.below(reader.adapt(models.escaped) + 1) - 1;
                    expected.saw(whole);
                    whole = expected.next() + unfolded(off);
                    if (uint32_t(whole + MOST) > 2 * MOST) return -1;
                    values[size_t(t) * dim + c] = float(whole) * step;
                }
                if (reader.past()) return -1;
            }
            for (int t = 0; t < tokens; t++)
                write_row(&values[size_t(t) * dim], dtype, dim, static_cast<uint8_t*>(x) + shape.place(layer, t, head));
        }
    return reader.done() ? 0 : -1;
}
