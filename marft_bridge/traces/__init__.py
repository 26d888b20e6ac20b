"""`marft-bridge traces`: look into a store, take it elsewhere, take somebody out of it."""
