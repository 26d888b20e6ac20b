"""Errors of ingest; each message is one line for the user."""

from __future__ import annotations

from marft_bridge.common.errors import QuotingError


class IngestError(QuotingError):
    """A file or a request that is no OTLP trace data, or a receiver that cannot start."""


class TooLarge(IngestError):  # noqa: N818 - says what the data is
    """More than what may be held in memory at once."""
