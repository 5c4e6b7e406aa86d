"""L12: puts the rooms together: Plan -> weights -> runner -> executor -> EngineCore, and the front ends on top."""
