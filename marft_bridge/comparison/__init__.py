"""Held-out tasks through several variants of a graph -> what may be claimed of them, and a report of it."""
