"""`marft-bridge traces`: show, query, check, export and import the episodes of a trace store."""
