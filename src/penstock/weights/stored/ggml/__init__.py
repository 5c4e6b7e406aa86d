"""ggml's block types, the weights of GGUF files: every block holds codes and scales of 32 to 256 inputs of one output.

matrix.py       blocks as a `StoredMatrix`, and their values
types.py        block type -> where a block keeps what; for k-quants in k_quants.py
grids.py        block types whose numbers are coded together: block -> values
grid_points.py  the points of their grids
fields.py       bits of bytes

Source: the block structs of ggml-common.h and `dequantize_row_*` of ggml-quants.c, github.com/ggml-org/llama.cpp.
Shape letters: N blocks, B bytes and K numbers of one (`formats.tensor_ref.BLOCKS`).
"""
