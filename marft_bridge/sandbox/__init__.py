"""Untrusted code, run in processes of its own that the kernel confines."""
