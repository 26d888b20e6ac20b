"""`marft-bridge promote`: a comparison's report -> adapter versions that are signed off for use."""
