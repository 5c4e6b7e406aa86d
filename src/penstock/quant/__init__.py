"""Rounding to few bits in numpy: the oracle of the schemes that native kernels pack."""
