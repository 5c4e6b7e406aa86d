// Rows times the panels of one matrix: what PST_LINEAR and PST_EXPERTS share.
#pragma once

#include <algorithm>

#include "block_rows.h"
#include "kernels.h"
#include "ops.h"

namespace pst {

// Up to so many numbers every thread prepares all rows for itself: that takes less than waiting for each other.
constexpr int64_t FEW_NUMBERS = 8192;
// Few rows wait for memory: a claim is long enough for the prefetchers, short enough to share fairly.
constexpr int64_t CLAIM_BYTES = 96 * 1024;
// Claims per thread below which one slow thread delays all.
constexpr int64_t CLAIMS = 4;
// The same where rows are many, and a claim takes milliseconds: the other thread is then seldom late by a whole one.
constexpr int64_t LONG_CLAIMS = 16;
// So many rows' outputs are asked for before they are worked out; with more, each a few rows before it is written.
constexpr int AWAITED_ROWS = 96;
constexpr int AWAITED_AHEAD = 8;
// Rows for which a panel is fetched at least, where there are as many.
constexpr int64_t BLOCK_ROWS = 96;
// Of its first panel a thread fetches so much ahead of the barrier: the prefetch of a kernel's loop begins behind it.
constexpr int64_t WARM_BYTES = 4096;
// So many rows a kernel takes at once: they fetch a panel, those behind them find it near.
constexpr int FIRST_ROWS = 6;
// Blocks of rows are multiples of this: no kernel's last group is then smaller than others.
constexpr int64_t ROW_STEP = 12;

inline int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

// What rows become for one or more segments.
struct Preparation {
    Prepare prepare;
    int32_t group;
    const int32_t* order;
    int64_t row_bytes;

    bool operator==(const Preparation& b) const {
        return prepare == b.prepare && group == b.group && order == b.order;
    }

    // Row x [cols] at `to`; `ordered` [cols] is room for it in the order of the panels.
    void row(const float* x, int32_t cols, float* ordered, uint8_t* to) const {
        if (order) {
            for (int32_t i = 0; i < cols; i++) ordered[i] = x[order[i]];
            x = ordered;
        }
        prepare(x, cols, group, to);
    }
};

// The panels of one matrix.
struct Segment {
    pst_matrix matrix;
    BlockShape shape;  // of PST_M_BLOCK
    const Product* product;
    int64_t panel_bytes, panels;
    int64_t columns;  // outputs: of a pair, the gated ones

    explicit Segment(const pst_matrix& matrix)
        : matrix(matrix), shape{}, product(find_product(matrix.format, matrix.act, matrix.code)),
          panel_bytes(pst_panel_bytes(&matrix)), panels(divided(matrix.rows, PANEL)),
          columns(matrix.pair ? matrix.rows / 2 : matrix.rows) {
        block_shape(matrix, shape);
    }

    Panel panel(int64_t p) const {
        Panel panel{static_cast<const uint8_t*>(matrix.data) + p * panel_bytes, matrix.cols};
        if (matrix.format == PST_M_BLOCK) panel.block = &shape;
        return panel;
    }
    const float* bias(int64_t p) const { return matrix.bias ? matrix.bias + p * PANEL : nullptr; }

    Preparation preparation() const {
        const int32_t group = matrix.format == PST_M_BLOCK ? group_of_rows(matrix.cols, shape.group, matrix.act) : 0;
        return {product->prepare, group, matrix.order, product->row_bytes(matrix.cols, group)};
    }
    int64_t unpacked_bytes() const { return product->many ? aligned(product->unpacked_bytes(matrix.cols)) : 0; }

    // What of panel p finds room beside the `bytes` of the one that `rows` rows meet before it.
    Coming coming(int64_t p, int64_t bytes, int rows) const {
        Coming coming;
        coming.at = panel(p).data;
        coming.bytes = std::max<int64_t>(0, std::min(panel_bytes, NEAR_BYTES - bytes));
        coming.rows = rows;
        return coming;
    }
    void warm(int64_t p) const {
        const uint8_t* first = panel(p).data;
        for (int64_t i = 0; i < std::min(WARM_BYTES, panel_bytes); i += 64) __builtin_prefetch(first + i);
    }
};

// Throws Misfit for a matrix that no format has, or rows of a kind that do not meet it.
inline void check_segment(const pst_matrix& matrix) {
    check_matrix(matrix);
    const Product* product = find_product(matrix.format, matrix.act, matrix.code);
    check(product, "rows of this kind do not meet matrices of this format");
    check(product->tile_rows >= 1 && product->tile_rows <= MAX_TILE_ROWS, "a kernel takes too many rows");
}

// A thread's memory for the sums of some rows and one panel.
struct PanelRun {
    float* tile;         // [tile_rows, 64]
    uint8_t* unpacked;   // unpacked_bytes
    const uint8_t* ready = nullptr;  // whose numbers are in `unpacked`

    // Rows from ... to-1 with panel p of a segment; `many`: rows enough meet it for unpacking it. Before the sums of rows
    // first ... first+count-1 are worked out, `await(first, count)`; then `finish(first, count, sums)`.
    template <class Await, class Finish>
    void multiply(const Segment& segment, int64_t p, const Rows& rows, int from, int to, bool many, Coming* coming,
                  Await await, Finish finish) {
        const Product& product = *segment.product;
        Panel panel = segment.panel(p);
        if (many) {
            if (ready != panel.data) product.unpack(panel, unpacked);
            ready = panel.data;
            panel.data = unpacked;
        } else if (coming && coming->bytes) {
            panel.coming = coming;
        }
        for (int r = from; r < to; r += product.tile_rows) {
            const int some = std::min(product.tile_rows, to - r);
            await(r, some);
            (many ? product.many : product.kernel)(rows, r, some, panel, tile);
            finish(r, some, tile);
        }
    }
};

inline void fetch_to_write(const float* p) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*p));  // without -mprfchw the builtin fetches it for reading
#else
    __builtin_prefetch(p, 1);
#endif
}

// Whether a row of one register lies on a row of the other.
bool overlap(const pst_register& a, const pst_register& b, int64_t rows);

}  // namespace pst
