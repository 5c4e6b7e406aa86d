"""L6: the list of operations a model is made of, and the tables of plain ones."""
