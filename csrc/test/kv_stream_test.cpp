// Keys and values as a stream of bits: what was rounded comes back, and no stream leads a reader out of its memory.
#include <cmath>

#include "check.h"

namespace {

// Numbers between -1 and 1, the same on every machine.
struct Drawn {
    uint32_t state;

    uint32_t next() { return state = state * 1664525u + 1013904223u; }
    float real() { return float(int32_t(next() >> 8) - (1 << 23)) / float(1 << 23); }
};

void there_and_back(int32_t layers, int32_t tokens, int32_t heads, int32_t dim, uint32_t seed) {
    Drawn drawn{seed};
    const size_t count = size_t(layers) * tokens * heads * dim;
    std::vector<float> x(count), once(count), twice(count), bins(size_t(layers), 0.75f);
    for (size_t i = 0; i < count; i++) {
        x[i] = drawn.real() + (i >= size_t(dim) ? 0.7f * x[i - size_t(dim)] : 0);
        if (drawn.next() % 97 == 0) x[i] *= 1000;
    }
    std::vector<uint8_t> out(count * 8 + 1024);
    auto encode = [&](int64_t room) {
        return pst_kv_encode(x.data(), PST_F32, layers, tokens, heads, dim, bins.data(), out.data(), room);
    };
    const int64_t bytes = encode(int64_t(out.size()));
    EXPECT(bytes > 0, "%d tokens of %d are written", tokens, dim);
    if (bytes <= 0) return;
    auto decode = [&](const std::vector<uint8_t>& data, std::vector<float>& to) {
        return pst_kv_decode(data.data(), int64_t(data.size()), PST_F32, layers, tokens, heads, dim, to.data());
    };
    std::vector<uint8_t> whole(out.begin(), out.begin() + bytes);
    EXPECT(decode(whole, once) == 0, "and read");
    EXPECT(decode(whole, twice) == 0 && !std::memcmp(once.data(), twice.data(), count * 4), "every time the same");
    note(whole.data(), whole.size());
    note(once.data(), count * 4);
    EXPECT(encode(bytes - 1) == -1, "no room");
    for (int n = 0; n < (brief ? 40 : 400); n++) {
        std::vector<uint8_t> bad(whole);
        for (uint32_t flips = 1 + (drawn.next() >> 30); flips > 0; flips--)
            bad[drawn.next() % bad.size()] ^= uint8_t(drawn.next() >> 24);
        if (n % 3 == 0) bad.resize(drawn.next() % bad.size());
        decode(bad, twice);  // whatever it says, a sanitizer looks at where it reads and writes
        if (n % 3 == 0 && bad.size() % 2 == whole.size() % 2) EXPECT(decode(bad, twice) == -1 || bad == whole, "cut short");
    }
}

}  // namespace

void test_kv_stream() {
    there_and_back(2, 32, 2, 64, 1);
    there_and_back(3, 5, 1, 7, 2);
    there_and_back(1, 1, 1, 1, 3);
    there_and_back(1, 200, 1, 16, 4);
    std::vector<float> x(64), bins(1, 1.0f);
    std::vector<uint8_t> out(4096);
    EXPECT(pst_kv_encode(x.data(), PST_F32, 1, 4097, 1, 1, bins.data(), out.data(), 4096) == -1, "too many tokens");
    EXPECT(pst_kv_encode(x.data(), PST_I8, 1, 8, 1, 8, bins.data(), out.data(), 4096) == -1, "codes are no numbers");
    EXPECT(pst_kv_decode(out.data(), 0, PST_F32, 1, 8, 1, 8, x.data()) == -1, "nothing is not a stream");
}
