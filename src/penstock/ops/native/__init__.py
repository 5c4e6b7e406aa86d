"""Native kernels through their C ABI (`csrc/include/penstock.h`): libraries, matrices, programs."""
