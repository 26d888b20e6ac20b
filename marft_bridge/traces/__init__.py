"""`marft-bridge traces`: show, query, check, export, import and erase the episodes of a trace store."""
