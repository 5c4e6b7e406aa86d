// The inner kernels of products, by format of the matrix and of the rows: one per pair and instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "penstock.h"

namespace pst {

constexpr int PANEL = 64;           // outputs of a panel
constexpr int MAX_TILE_ROWS = 384;  // no kernel takes more rows at once

// How far ahead of their loads products of few rows ask for weights, in bytes; 0: not at all.
extern const int64_t STREAM_AHEAD;

// Bytes of weights that stay in the second cache of a core.
extern const int64_t NEAR_BYTES;

// Rows made ready for products: float32, bfloat16 or s8, each padded with zeros to what the format needs, and what belongs
// to them (block_rows.h).
struct Rows {
    const uint8_t* data;
    int64_t stride;  // bytes from row to row
    int32_t count;
};

// Weights that come next, fetched into the second cache while rows behind the first ones meet a panel that is there
// already: the memory would have nothing to do. Each row fetches the same part; that of the first rows is left for them
// to read from the memory as ever. So it is busy all the time, and nobody waits longer than for it.
struct Coming {
    const uint8_t* at = nullptr;
    int64_t bytes = 0;  // for all rows together
    int rows = 0;
    bool fresh = true;  // no row has met the panel

    struct Part {
        const uint8_t* at = nullptr;
        int64_t stride = 0;  // bytes in each step, two lines at most; 0: nothing

        void step() {
            if (!stride) return;
            __builtin_prefetch(at, 0, 2);
            if (stride > 64) __builtin_prefetch(at + 64, 0, 2);
            at += stride;
        }
    };

    // For `count` rows that meet the panel in `steps` steps.
    Part take(int count, int64_t steps) {
        Part part{at, 0};
        if (!fresh) part.stride = bytes * count / rows / steps;
        at += part.stride * steps;
        fresh = false;
        return part;
    }
};

struct BlockShape;

struct Panel {
    const uint8_t* data;
    int32_t cols;  // K, without padding
    const BlockShape* block = nullptr;  // of PST_M_BLOCK
    Coming* coming = nullptr;
};

// Rows first ... first+count-1 times a panel: tile[i * 64 + j], all scales applied. One chain of additions per output,
// over the inputs in order, whatever `count` is: 1 ... tile_rows.
using Kernel = void (*)(const Rows& rows, int first, int count, const Panel& panel, float* tile);

// A row of float32 [cols] made ready at `data`. `group`: of PST_M_BLOCK.
using Prepare = void (*)(const float* x, int cols, int group, uint8_t* data);

// How rows of one kind meet matrices of one format.
struct Product {
    int32_t format, act;
    int32_t tile_rows;                          // rows that `kernel` takes at most
    int64_t (*row_bytes)(int cols, int group);  // of a prepared row: a multiple of 64
    Prepare prepare;
    Kernel kernel;
    // For many rows: the panel is turned once into `unpacked_bytes` of scratch (64-byte aligned), which `many` reads in
    // place of it. Null: `kernel` does it all. Bits are those of `kernel`.
    int64_t (*unpacked_bytes)(int cols);
    void (*unpack)(const Panel& panel, uint8_t* scratch);
    Kernel many;
    int32_t many_rows;  // rows from which this pays
};

// Null for a pair that is none. `code`: of PST_M_BLOCK.
const Product* find_product(int32_t format, int32_t act, int32_t code = PST_C_U8);

// gemm_float.cpp and block_float.cpp have these for their formats; null if the pair is not theirs.
const Product* float_product(int32_t format, int32_t act);
const Product* block_product(int32_t format, int32_t act, int32_t code);

// A panel in its format: `row_of` as in pst_pack, of this panel's 64 outputs. False if the format is not theirs.
bool pack_float(int32_t format, int cols, int32_t dtype, const void* const* row_of, uint8_t* data);
bool pack_rounded(const BlockShape& shape, int32_t dtype, const void* const* row_of, uint8_t* data);

// The values of output `output` of a matrix in its format, [cols]: what pst_unpack gives of it.
void matrix_row(const pst_matrix& m, int64_t output, float* out);

// `n` numbers of `dtype` (PST_F32, PST_F16, PST_BF16) as float32.
void widen(const void* x, int32_t dtype, int64_t n, float* out);

}  // namespace pst
