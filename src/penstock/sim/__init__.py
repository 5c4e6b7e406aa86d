"""L13: the same engine on a virtual clock, fed with real traces."""
