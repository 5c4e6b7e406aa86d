"""Models as native programs: fuse a copy of the graph, lay out memory, pack the weights.

backend.py   whether, and how
emit.py      nodes -> native operations over an arena
forward.py   the `Forward` that the runner calls
packed.py    packed weights on disk, from one start to the next
"""
