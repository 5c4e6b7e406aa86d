"""L1: the vocabulary of the engine as plain data, and the protocols everything above is written against."""
