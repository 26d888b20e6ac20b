"""`marft-bridge plan`: recorded calls of a hosted app -> which nodes to move to a local model first, and which not."""
