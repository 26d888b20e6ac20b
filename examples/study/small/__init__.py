"""The study on a small model: four graphs, many seeds, seconds a run."""
