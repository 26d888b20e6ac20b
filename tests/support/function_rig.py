"""A node's function and its state -> what is said of its reads at each of its calls, while it really runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from marft_bridge.recording.function_reads import callable_to_reads
from marft_bridge.recording.node_bytecode import ReadKeys
from marft_bridge.recording.state_reads import Reads


def reads_to_text(reads: ReadKeys) -> str:
    """`a | a b`: what was read for certain, and what may have been; `*` for the whole state."""
    possible = "*" if reads.possible is None else " ".join(sorted(reads.possible))
    return f"{' '.join(sorted(reads.certain))} | {possible}".strip()


def reads_at_calls(function: Callable[[Any], Any], state: Any) -> list[ReadKeys]:
    """What has been read by each call of `ask`, a global that is added to the function, and after the function."""
    reads, seen = Reads(), []

    def ask(*_: Any) -> str:
        seen.append(reads.so_far())
        return ""

    function_globals: dict[str, Any] = getattr(function, "__globals__", {})
    function_globals["ask"] = ask
    reads.begin(callable_to_reads(function, state))
    reads.runs_inside(sys._getframe())
    has_returned = False
    try:
        function(state)
        has_returned = True
    except LookupError:
        pass
    finally:
        reads.end(has_returned=has_returned)
    return [*seen, reads.so_far()]
