"""L8: one model over several ranks: what each of them holds, and how they tell each other."""
