"""`marft-bridge view`: a trace store and its run folder -> pages that a browser on this machine can walk through."""
