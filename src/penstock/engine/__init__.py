"""L5: the loop. Ids only; what runs a step is known as a Protocol."""
