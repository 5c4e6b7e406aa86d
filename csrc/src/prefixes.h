// Which sequences of a step begin with the same pages.
#pragma once

#include <vector>

#include "ops.h"

namespace pst {

// Memory for the order of a step's sequences. Pages that two sequences have in common are those of the prefix cache, so
// equal numbers are equal keys and values, and nobody has to say who shares what.
class PrefixOrder {
public:
    explicit PrefixOrder(int max_sequences);
    // Of sequences that have forgotten nothing and whose pages are slabs. Good until the next call.
    Prefixes of(const pst_step& step, const pst_group& group);

private:
    std::vector<int32_t> order, common;
};

}  // namespace pst
