"""What `--substitute` says -> how the calls of an agent that is replaced are answered, and what a team is called.

Invariant: a substitute that would change nothing is refused by name. It knows neither runs nor scores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_bridge.contribution.games import Team
from marft_bridge.errors import ConfigError

_FORMS = "base, silent, version:N or text:ANSWER"


@dataclass(frozen=True, slots=True)
class Substitute:
    """Who stands in: an adapter version, or a text that answers every call. One of the two is None."""

    label: str  # in names and sources; of a text only its hash, since it may hold anything
    version: int | None = None
    answer: str | None = None

    def standing_in(
        self, on: Team, agents: Sequence[str], team: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Versions of nodes, and texts of nodes, when all of `agents` but those in `on` are replaced."""
        replaced = [agent for agent in agents if agent not in on]
        if self.answer is not None:
            kept = {node: version for node, version in team.items() if node not in replaced}
            return kept, dict.fromkeys(replaced, self.answer)
        assert self.version is not None
        return {**team, **dict.fromkeys(replaced, self.version)}, {}

    def team_name(self, on: Team, agents: Sequence[str]) -> str:
        """The variant of a team's episodes."""
        replaced = [agent for agent in agents if agent not in on]
        return f"without {'+'.join(replaced)} ({self.label})" if replaced else "team"


def text_to_substitute(given: str) -> Substitute:
    """Raises ConfigError for what is none of the forms."""
    kind, colon, rest = given.partition(":")
    if given == "base":
        return Substitute("base", version=0)
    if given == "silent":
        return Substitute("silent", answer="")
    if kind == "version" and rest.isascii() and rest.isdecimal():
        return Substitute(f"version {int(rest)}", version=int(rest))
    if kind == "text" and colon:
        return Substitute(f"text {hashlib.sha256(rest.encode()).hexdigest()[:8]}", answer=rest)
    raise ConfigError(f"credit --substitute: {given!r} is none of {_FORMS}")


def refuse_idle(substitute: Substitute, agents: Sequence[str], team: Mapping[str, int], frozen: Sequence[str]) -> None:
    """Refuses a version for an agent that runs at it anyway, or for one that has no others."""
    if substitute.version is None:
        return
    for agent in agents:
        at = 0 if agent in frozen else team[agent]
        if at == substitute.version:
            raise ConfigError(
                f"credit --substitute {substitute.label}: node {agent!r} runs at version {at} already, so nothing "
                "would be replaced; use silent or text:ANSWER, or leave it out of --nodes"
            )
        if agent in frozen:
            raise ConfigError(
                f"credit --substitute {substitute.label}: node {agent!r} is in graph.frozen and has no other version; "
                "use silent or text:ANSWER, or leave it out of --nodes"
            )
