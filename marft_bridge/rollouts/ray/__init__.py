"""Collecting on a Ray cluster: workers run episodes, the driver files their records."""
