"""The trace store: a DuckDB file of spans and of the Flex-MG trajectories that they assemble to."""
