// Where a sequence keeps the keys and values of a layer.
#pragma once

#include "ops.h"

namespace pst {

// The pages of one sequence for one layer of a group.
struct Pages {
    const int32_t* ids;
    int64_t factor, offset;
    int block_size;

    Pages(const pst_group& group, int sequence, int layer) : block_size(group.block_size) {
        // A shared table names slabs that hold a page of every layer; a ragged one has a line of pages per layer.
        bool shared = group.lanes[sequence] == 1;
        ids = group.tables[sequence] + (shared ? 0 : int64_t(layer) * group.strides[sequence]);
        factor = shared ? group.num_layers : 1;
        offset = shared ? layer : 0;
    }
    int64_t page(int block) const { return ids[block] * factor + offset; }
};

inline int item_bytes(int32_t dtype) { return dtype == PST_F32 ? 4 : 2; }

inline void check_plane(const pst_plane& plane, int heads, int dim) {
    check(plane.dtype == PST_F32 || plane.dtype == PST_F16 || plane.dtype == PST_BF16, "a plane's dtype is unknown");
    check(heads > 0 && dim > 0 && plane.heads == heads && plane.dim == dim, "heads do not fit their plane");
}

// cache_write.cpp and attention.cpp.
OpPtr make_write(const pst_op& op, const Maker& maker);
OpPtr make_attention(const pst_op& op, const Maker& maker);

}  // namespace pst
