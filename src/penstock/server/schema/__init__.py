"""Shapes on the wire, as msgspec structs: what bodies are read into, and what answers are made of."""
