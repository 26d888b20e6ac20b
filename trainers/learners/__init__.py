"""Learners that are led: one process takes all decisions about a run, the others follow its calls of the trainer."""
