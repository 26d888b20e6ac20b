"""`marft-bridge traces erase`: a subject or an age -> a run without what was said, and what is left, by file."""
