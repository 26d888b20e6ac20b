"""Forks of recorded episodes: repeated up to a call, which is sampled anew, and run on from there."""
