"""L4: who runs next, for how many tokens, and who yields. Integers only."""
