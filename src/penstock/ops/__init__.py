"""L6: the list of operations a model is made of, and their implementations."""
