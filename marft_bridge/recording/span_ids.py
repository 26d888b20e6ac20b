"""Random ids for spans, drawn from the operating system, so that recording changes no random number of the app.

OpenTelemetry draws ids from the module `random`: a seeded app would get other numbers when it is recorded, and two
runs after the same `random.seed()` would be one trace.
"""

from __future__ import annotations

import os

from opentelemetry.sdk.trace.id_generator import IdGenerator


class SystemIds(IdGenerator):
    """Ids that no seed can repeat; never zero, which is no valid id."""

    def generate_span_id(self) -> int:
        """64 random bits, not all zero."""
        return int.from_bytes(os.urandom(8)) or 1

    def generate_trace_id(self) -> int:
        """128 random bits, not all zero."""
        return int.from_bytes(os.urandom(16)) or 1

    def is_trace_id_random(self) -> bool:
        """True: all bits are random."""
        return True
