"""L11: what is measured, each thing defined once, for the simulator, the benchmarks and the server. Numbers only."""
