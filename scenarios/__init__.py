"""The world: simulated disk, faults, workloads, oracle, catalog of scenarios. Nothing runs here yet."""
