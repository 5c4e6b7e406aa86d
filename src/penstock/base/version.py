"""Which Penstock this is, for every layer: importing the package itself leads to what is above."""

__version__ = "0.2.0"
