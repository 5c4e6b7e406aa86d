"""A model over servers that hold some of its layers each, and come and go: Petals (arXiv 2209.01188, 2312.08361)."""
