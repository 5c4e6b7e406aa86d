// Where a sequence keeps the keys and values of a layer.
#pragma once

#include "ops.h"

namespace pst {

// The pages of one sequence for one line of a group.
struct Pages {
    const int32_t* ids;
    int64_t factor, offset;
    int block_size;
    const int32_t* slots = nullptr;  // if there are any: which one has the place of each that is looked up

    Pages(const pst_group& group, int sequence, int line) : block_size(group.block_size) {
        // A shared table names slabs that hold a page of every line; a ragged one has its pages line by line.
        bool shared = group.shared[sequence] == 1;
        ids = group.tables[sequence] + (shared ? 0 : int64_t(line) * group.strides[sequence]);
        factor = shared ? group.num_lines : 1;
        offset = shared ? line : 0;
    }
    // Pages by their own numbers.
    Pages(const int32_t* ids, int block_size) : ids(ids), factor(1), offset(0), block_size(block_size) {}
    int64_t page(int block) const { return ids[block] * factor + offset; }
};

// How far the slots of a sequence's line are behind its positions.
inline int dropped(const pst_group& group, int sequence, int line) {
    const int32_t* lines = group.dropped ? group.dropped[sequence] : nullptr;
    return lines ? lines[line] : 0;
}

// Which of a layer's kv heads are kept together: in pages of one line, or each in its own.
struct Lines {
    int layer = 0;
    int count = 1;  // of the layer

    int of(int head) const { return layer * count + (count > 1 ? head : 0); }
    int in_page(int head) const { return count > 1 ? 0 : head; }
};

// Where a sequence that has forgotten nothing keeps token t of the step: as many tokens from its beginning. Of a tree of
// guesses only the root has the number of its position for a slot.
inline int slot_of(const pst_step& step, int sequence, int64_t t) {
    int first = step.query_start_loc[sequence];
    return step.positions[first] + int(t - first);
}

// Whether a step's mask names no token behind the one that sees, and each token's position is the number of tokens that
// it sees: nothing else keeps reads within the pages.
inline bool mask_fits(const pst_step& step) {
    for (int b = 0; b < step.num_seqs; b++) {
        int first = step.query_start_loc[b], end = step.query_start_loc[b + 1];
        for (int t = first; t < end; t++) {
            uint64_t seen = step.mask[t];
            int own = t - first, depth = seen ? __builtin_popcountll(seen) - 1 : own;
            if (seen && (end - first > 64 || seen >> own != 1)) return false;
            if (step.positions[t] != step.positions[first] + depth) return false;
        }
    }
    return true;
}

// Whether no line has forgotten more than there was, and none that a tree stands on anything: as above.
inline bool dropped_fits(const pst_step& step, const pst_group& group) {
    for (int b = 0; group.dropped && b < step.num_seqs; b++) {
        const int32_t* lines = group.dropped[b];
        int first = step.query_start_loc[b], end = step.query_start_loc[b + 1];
        if (!lines || first == end) continue;
        int most = step.positions[first];
        for (int t = first; step.mask && t < end; t++)
            if (step.mask[t]) most = 0;
        for (int i = 0; i < group.num_lines; i++)
            if (lines[i] < 0 || lines[i] > most) return false;
    }
    return true;
}

inline int item_bytes(int32_t dtype) { return dtype == PST_F32 ? 4 : dtype == PST_I8 ? 1 : 2; }

// Into how many lines of `plane` a layer's heads fall.
inline int check_plane(const pst_plane& plane, int heads, int dim) {
    check(plane.dtype >= PST_F32 && plane.dtype <= PST_I8, "a plane's dtype is unknown");
    check(heads > 0 && dim > 0 && (plane.heads == heads || plane.heads == 1) && plane.dim == dim,
          "heads do not fit their plane");
    return heads / plane.heads;
}

// The scales of a plane of 8 bits; nothing for others.
inline pst_plane scales_of(const Maker& maker, int group, const pst_plane& plane) {
    if (plane.dtype != PST_I8) return {};
    const pst_plane& scales = maker.plane(group, plane.scales);
    check(scales.dtype == PST_F32 && scales.heads == plane.heads && scales.dim == 1, "a plane of 8 bits has no scales");
    return scales;
}

inline uint8_t* number(const pst_plane& p, int64_t page, int offset, int head) {
    int64_t at = page * p.page_stride + offset * p.token_stride + head * p.head_stride;
    return static_cast<uint8_t*>(p.data) + at * item_bytes(p.dtype);
}

// One head of a token as its plane holds it, with its scale if that has some (cache_write.cpp).
void keep_row(const pst_plane& plane, const pst_plane& scales, int64_t page, int offset, const float* row, int head = 0);

// cache_write.cpp and attention.cpp.
OpPtr make_write(const pst_op& op, const Maker& maker);
OpPtr make_attention(const pst_op& op, const Maker& maker);

}  // namespace pst
