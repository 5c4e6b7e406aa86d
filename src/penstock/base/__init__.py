"""L0: errors, clocks, registries, hashing, random numbers. Imports nothing of Penstock."""
