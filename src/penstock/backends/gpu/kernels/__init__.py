"""Kernels in Triton, a file per kind. Each has a launcher on tensors; `catalogue` lists them."""
