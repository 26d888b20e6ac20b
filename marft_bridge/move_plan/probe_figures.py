"""The figures of a node's probe, apart from what computes them: who reads them needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from marft_bridge.statistics.means import MeanInterval


@dataclass(frozen=True, slots=True)
class NodeFit:
    """What a local base model makes of one node's recorded answers. Nats a token; less is better."""

    node: str
    calls: int  # scored
    tokens: int  # sampled ones of these
    base: MeanInterval | None  # of all scored calls; None without any
    spread: float | None  # standard deviation over calls of their own nats a token; None below two calls
    refused: Mapping[str, int] = field(default_factory=dict)  # reason -> calls that could not be rendered
    probe: Probe | None = None
    no_probe: str | None = None  # why there is none


@dataclass(frozen=True, slots=True)
class Probe:
    """A few steps of imitation, and what they did to calls that were held out."""

    fitted_calls: int
    held_calls: int
    steps: int
    before: MeanInterval  # of the held-out calls
    after: MeanInterval
    gain: MeanInterval  # before less after, token by token

    @property
    def helps(self) -> bool:
        """Whether imitation is shown to make held-out answers likelier."""
        return self.gain.low is not None and self.gain.low > 0
