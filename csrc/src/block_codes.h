// Codes of PST_M_BLOCK in registers: line L (of 8) of a unit as bytes, 4 inputs of each of 16 outputs (block.h).
#pragma once

#include <utility>

#include "block.h"
#include "int_lanes.h"

namespace pst {

constexpr int TABLE_OFFSET = 128;  // of values of a table, as bytes

constexpr int LINE = 64;           // bytes: 4 of each of 16 outputs
constexpr int PANEL_LINE = 4 * LINE;

// The bits of each byte that are set in MASK, after a shift by LEFT (to the left, or the right if it is negative).
template <int LEFT, int MASK> inline I byte_bits(I a) { return masked<MASK>(shifted<LEFT>(a)); }

// MOST: the largest byte. FETCH: codes come from the memory, as they lie in a panel.
struct Code8 {
    static constexpr int BYTES = 2048;
    static constexpr int MOST = 255;
    static constexpr bool FETCH = false;
    explicit Code8(const BlockShape&) {}
    template <int L> I line(const uint8_t* unit) const { return load_line(unit + L * PANEL_LINE); }
};
struct Code7 : Code8 {
    static constexpr int MOST = 127;
    using Code8::Code8;
};
struct CodeNibbles : Code8 {
    static constexpr int MOST = 15;
    using Code8::Code8;
};
// Less 128, and none of them is -128 then.
struct CodeS8 : Code8 {
    using Code8::Code8;
};
struct CodeU8 : Code8 {
    static constexpr bool FETCH = true;
    using Code8::Code8;
};
struct Code4 {
    static constexpr int BYTES = 1024, MOST = 15;
    static constexpr bool FETCH = true;
    explicit Code4(const BlockShape&) {}
    template <int L> I line(const uint8_t* unit) const {
        return byte_bits<-4 * (L % 2), 15>(load_line(unit + L / 2 * PANEL_LINE));
    }
};
struct Code6 : Code4 {
    static constexpr int BYTES = 1536, MOST = 63;
    using Code4::Code4;
    template <int L> I line(const uint8_t* unit) const {
        return either(Code4::line<L>(unit), byte_bits<4 - 2 * (L % 4), 0x30>(load_line(unit + 1024 + L / 4 * PANEL_LINE)));
    }
};
struct Code5 : Code4 {
    static constexpr int BYTES = 1280, MOST = 31;
    using Code4::Code4;
    template <int L> I line(const uint8_t* unit) const {
        return either(Code4::line<L>(unit), byte_bits<4 - L, 0x10>(load_line(unit + 1024)));
    }
};
struct Code2 {
    static constexpr int BYTES = 512, MOST = 3;
    static constexpr bool FETCH = true;
    explicit Code2(const BlockShape&) {}
    template <int L> I line(const uint8_t* unit) const {
        return byte_bits<-2 * (L % 4), 3>(load_line(unit + L / 4 * PANEL_LINE));
    }
};
struct Code3 : Code2 {
    static constexpr int BYTES = 768, MOST = 7;
    using Code2::Code2;
    template <int L> I line(const uint8_t* unit) const {
        return either(Code2::line<L>(unit), byte_bits<2 - L, 4>(load_line(unit + 512)));
    }
};
struct CodeT4 : Code4 {
    static constexpr int MOST = 255;
    I table;
    explicit CodeT4(const BlockShape& s) : Code4(s) {
        uint8_t bytes[16];
        for (int i = 0; i < 16; i++) bytes[i] = uint8_t(int(s.table[i]) + TABLE_OFFSET);
        table = four_times(bytes);
    }
    template <int L> I line(const uint8_t* unit) const { return looked_up(table, Code4::line<L>(unit)); }
};

template <class Code, int... L>
inline __attribute__((always_inline)) void widen_unit(const Code& code, const uint8_t* unit, int vector, uint8_t* out,
                                                      std::integer_sequence<int, L...>) {
    (store_line(out + L * PANEL_LINE + vector * LINE, code.template line<L>(unit + vector * LINE)), ...);
}

}  // namespace pst
