"""`opentelemetry-instrument python app.py` -> the app's LangGraph runs in the store that MARFT_STORE names.

OpenTelemetry finds the class through the entry point group `opentelemetry_instrumentor`. Invariant: without MARFT_STORE
it logs one line, records nothing and imports nothing heavy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # it opts out

from marft_bridge.common.errors import BridgeError

log = logging.getLogger("marft_bridge")

STORE_VARIABLE = "MARFT_STORE"


class MarftInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """`marft_bridge.instrument()` in the shape that OpenTelemetry's tools expect."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """The packages without which there is nothing to record."""
        return ("langgraph >= 1.2, < 2",)

    def _instrument(self, store: str | None = None, **kwargs: Any) -> None:
        if kwargs:
            # Tools usually pass tracer_provider: its sampling could drop spans that training needs, so we use our own.
            raise BridgeError(f"MarftInstrumentor takes a store and nothing else; leave out {', '.join(kwargs)}")
        path = store or os.environ.get(STORE_VARIABLE)
        if not path:
            log.warning("no LangGraph run is recorded: set %s to the path of a store", STORE_VARIABLE)
            return
        from marft_bridge.recording.instrument import instrument

        instrument(path)

    def _uninstrument(self, **kwargs: Any) -> None:
        from marft_bridge.recording.instrument import uninstrument

        uninstrument()
