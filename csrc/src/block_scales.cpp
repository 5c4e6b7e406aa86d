// Scales and zeros of a chunk of PST_M_BLOCK as floats.
#include <utility>

#include "block.h"
#include "grids.h"
#include "int_lanes.h"
#include "kernels.h"

namespace pst {

namespace {

inline const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

// Sixteen scales of a type.
template <int SCALE>
inline F load_scales(const uint8_t* p) {
    if constexpr (SCALE == PST_S_F32) return load(reinterpret_cast<const float*>(p));
    else if constexpr (SCALE == PST_S_F16) return load_f16(halves(p));
    else if constexpr (SCALE == PST_S_BF16) return load_bf16(halves(p));
    else if constexpr (SCALE == PST_S_E4M3) return load_e4m3(p);
    else if constexpr (SCALE == PST_S_E8M0) return load_e8m0(p);
    else if constexpr (SCALE == PST_S_I8_F16) return load_i8(p);
    else return load_u8(p);
}

template <int SCALE, int ZERO, bool NIBBLES>
void expand(const BlockShape& s, const uint8_t* at, int groups, float* scales, float* zeros) {
    constexpr bool SUPERS = SCALE >= PST_S_U8_F16, SUPER_ZEROS = ZERO == PST_Z_U8_F16;
    constexpr int EACH = SCALE == PST_S_F32 ? 4 : SCALE == PST_S_F16 || SCALE == PST_S_BF16 ? 2 : 1;
    constexpr int ZERO_EACH = ZERO == PST_Z_U8 || ZERO == PST_Z_U8_F16 ? 1 : 2;
    const uint8_t* from = at + (SUPERS + SUPER_ZEROS) * 2 * PANEL;
    const uint8_t* from_zeros = from + groups * PANEL * EACH;
    for (int j = 0; j < PANEL; j += LANES) {
        // An integer times a half is exact.
        F factor = all(s.factor);
        if constexpr (SUPERS) factor = load_f16(halves(at) + j) * factor;
        F super_zero = all(0.0f);
        if constexpr (SUPER_ZEROS) super_zero = all(0.0f) - load_f16(halves(at + SUPERS * 2 * PANEL) + j);
        for (int g = 0; g < groups; g++) {
            const uint8_t* stored = from + (g * PANEL + j) * EACH;
            const uint8_t* zero = from_zeros + (g * PANEL + j) * ZERO_EACH;
            const F value = (NIBBLES ? load_nibbles<0>(stored) : load_scales<SCALE>(stored)) * factor;
            store(scales + g * PANEL + j, value);
            if constexpr (ZERO == PST_Z_U8) store(zeros + g * PANEL + j, (all(0.0f) - load_u8(zero)) * value);
            if constexpr (ZERO == PST_Z_F16_CODES) store(zeros + g * PANEL + j, (all(0.0f) - load_f16(halves(zero))) * value);
            if constexpr (ZERO == PST_Z_BF16_CODES) store(zeros + g * PANEL + j, (all(0.0f) - load_bf16(halves(zero))) * value);
            if constexpr (ZERO == PST_Z_F16) store(zeros + g * PANEL + j, all(0.0f) - load_f16(halves(zero)));
            if constexpr (SUPER_ZEROS)
                store(zeros + g * PANEL + j, (NIBBLES ? load_nibbles<4>(stored) : load_u8(zero)) * super_zero);
        }
    }
}

using Expand = void (*)(const BlockShape&, const uint8_t*, int, float*, float*);
constexpr int ZERO_KINDS = 6;

template <int... I>
Expand find(int index, std::integer_sequence<int, I...>) {
    static constexpr Expand ALL[] = {expand<I / ZERO_KINDS, I % ZERO_KINDS, false>...};
    return ALL[index];
}

// Blocks of ggml's hold scales among the codes.
void scales_of_blocks(const BlockShape& s, const uint8_t* blocks, float* scales) {
    float found[MOST_GROUPS];
    for (int j = 0; j < PANEL; j++) {
        grid_scales(s.code, blocks + j * s.block_bytes, found);
        for (int g = 0; g < CHUNK / s.group; g++) scales[g * PANEL + j] = found[g] * s.factor;
    }
}

}  // namespace

void block_scales(const BlockShape& s, const uint8_t* panel, int64_t chunk, int64_t ahead, float* scales, float* zeros) {
    const uint8_t* at = s.group ? panel + s.chunk_at(chunk) : panel;
    if (s.block_bytes) return scales_of_blocks(s, at, scales);
    const int groups = s.group ? s.groups_of(chunk) : 1;
    if (ahead)
        for (int64_t i = 0; i < s.head_of(groups); i += 64) __builtin_prefetch(at + ahead + i);
    if (s.nibbles) return expand<PST_S_U8_F16, PST_Z_U8_F16, true>(s, at, groups, scales, zeros);
    find(s.scale * ZERO_KINDS + s.zero, std::make_integer_sequence<int, 7 * ZERO_KINDS>())(s, at, groups, scales, zeros);
}

}  // namespace pst
