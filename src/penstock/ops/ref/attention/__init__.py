"""Attention over cached keys and values in numpy; `ops.attention` has the names."""
