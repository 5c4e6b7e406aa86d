// Few rows and codes as they lie, turned in registers: what is read is what waits for the memory.
#include "block_int.h"

namespace pst {

const Add* find_few([[maybe_unused]] int32_t code, [[maybe_unused]] Scales scales, [[maybe_unused]] bool zeros) {
    struct Kernel {
        int32_t code;
        Scales scales;
        bool zeros;
        const Add* by_rows;
    };
#if defined(PST_VECTORS)
    // Those that files have: others are made ready.
    static constexpr Kernel KERNELS[] = {
        {PST_C_U8, ROW, false, BY_ROWS<CodeU8, ROW, false>},       {PST_C_U8, ROW, true, BY_ROWS<CodeU8, ROW, true>},
        {PST_C_U8, BLOCKS, false, BY_ROWS<CodeU8, BLOCKS, false>}, {PST_C_U8, BLOCKS, true, BY_ROWS<CodeU8, BLOCKS, true>},
        {PST_C_U6, HALVES, false, BY_ROWS<Code6, HALVES, false>},
        {PST_C_U5, BLOCKS, false, BY_ROWS<Code5, BLOCKS, false>}, {PST_C_U5, BLOCKS, true, BY_ROWS<Code5, BLOCKS, true>},
        {PST_C_U4, ROW, false, BY_ROWS<Code4, ROW, false>},       {PST_C_U4, ROW, true, BY_ROWS<Code4, ROW, true>},
        {PST_C_U4, BLOCKS, false, BY_ROWS<Code4, BLOCKS, false>}, {PST_C_U4, BLOCKS, true, BY_ROWS<Code4, BLOCKS, true>},
        {PST_C_U3, HALVES, false, BY_ROWS<Code3, HALVES, false>}, {PST_C_U3, BLOCKS, false, BY_ROWS<Code3, BLOCKS, false>},
        {PST_C_U3, BLOCKS, true, BY_ROWS<Code3, BLOCKS, true>},   {PST_C_U2, HALVES, true, BY_ROWS<Code2, HALVES, true>},
        {PST_C_U2, BLOCKS, false, BY_ROWS<Code2, BLOCKS, false>}, {PST_C_U2, BLOCKS, true, BY_ROWS<Code2, BLOCKS, true>},
        {PST_C_U8, LONG, false, BY_ROWS<CodeU8, LONG, false>},     {PST_C_U8, LONG, true, BY_ROWS<CodeU8, LONG, true>},
        {PST_C_U4, LONG, false, BY_ROWS<Code4, LONG, false>},     {PST_C_U4, LONG, true, BY_ROWS<Code4, LONG, true>},
        {PST_C_U3, LONG, false, BY_ROWS<Code3, LONG, false>},     {PST_C_U3, LONG, true, BY_ROWS<Code3, LONG, true>},
        {PST_C_U2, LONG, false, BY_ROWS<Code2, LONG, false>},     {PST_C_U2, LONG, true, BY_ROWS<Code2, LONG, true>},
        {PST_C_T4, HALVES, false, BY_ROWS<CodeT4, HALVES, false>}, {PST_C_T4, BLOCKS, false, BY_ROWS<CodeT4, BLOCKS, false>},
    };
    for (const Kernel& kernel : KERNELS)
        if (kernel.code == code && kernel.scales == scales && kernel.zeros == zeros) return kernel.by_rows;
#endif
    return nullptr;  // without vectors turning codes is what takes long, once is enough
}

}  // namespace pst
