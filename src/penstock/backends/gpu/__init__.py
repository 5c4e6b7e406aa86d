"""Torch, on a GPU or on the CPU: the only room that imports it. Needs `penstock[gpu]`."""
