"""Files, memory and processes."""
