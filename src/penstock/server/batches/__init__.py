"""Batches and the files they are made of."""
