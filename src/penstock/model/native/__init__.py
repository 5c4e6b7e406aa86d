"""Models as native programs: trace the calls, fuse them, lay out memory, pack the weights.

trace.py    calls over named registers -> nodes over values that are never overwritten
fuse.py     nodes that one native operation can do become one
emit.py     nodes -> native operations over an arena
forward.py  the `Forward` that the runner calls
"""
