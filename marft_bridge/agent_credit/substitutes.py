"""The text of `--substitute` -> what answers the calls of a replaced agent, and the names of the teams.

Invariant: a substitute that would change nothing for one of its agents is refused, with the agent's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_bridge.common.errors import ConfigError
from marft_bridge.statistics.shapley import Team

_FORMS = "base, silent, version:N or text:ANSWER"


@dataclass(frozen=True, slots=True)
class Substitute:
    """What replaces an agent: an adapter version, or a text that answers every call. One of the two is None."""

    label: str  # in team names and reward sources; of a text only its hash, since it may hold secrets
    version: int | None = None
    answer: str | None = None

    def replace_agents(
        self, team: Team, agents: Sequence[str], versions: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Replaces all of `agents` but those in `team` -> node -> adapter version, and node -> text that answers.

        `versions` are those of the full team. A node that a text answers is in the second mapping only.
        """
        replaced = [agent for agent in agents if agent not in team]
        if self.answer is not None:
            remaining = {node: version for node, version in versions.items() if node not in replaced}
            return remaining, dict.fromkeys(replaced, self.answer)
        assert self.version is not None
        return {**versions, **dict.fromkeys(replaced, self.version)}, {}

    def team_name(self, team: Team, agents: Sequence[str]) -> str:
        """The name of the variant that a team's episodes are stored under."""
        replaced = [agent for agent in agents if agent not in team]
        return f"without {'+'.join(replaced)} ({self.label})" if replaced else "team"


def text_to_substitute(text: str) -> Substitute:
    """A text of one of `_FORMS` into the substitute; ConfigError for any other."""
    kind, colon, argument = text.partition(":")
    if text == "base":
        return Substitute("base", version=0)
    if text == "silent":
        return Substitute("silent", answer="")
    if kind == "version" and argument.isascii() and argument.isdecimal():
        return Substitute(f"version {int(argument)}", version=int(argument))
    if kind == "text" and colon:
        return Substitute(f"text {hashlib.sha256(argument.encode()).hexdigest()[:8]}", answer=argument)
    raise ConfigError(f"credit --substitute: {text!r} is none of {_FORMS}")


def refuse_no_op_substitute(
    substitute: Substitute, agents: Sequence[str], versions: Mapping[str, int], frozen: Sequence[str]
) -> None:
    """Raises ConfigError for a version that an agent runs at already, or for an agent without other versions."""
    if substitute.version is None:
        return
    for agent in agents:
        current = 0 if agent in frozen else versions[agent]
        if current == substitute.version:
            raise ConfigError(
                f"credit --substitute {substitute.label}: node {agent!r} runs at version {current} already, so nothing "
                "would be replaced; use silent or text:ANSWER, or leave it out of --nodes"
            )
        if agent in frozen:
            raise ConfigError(
                f"credit --substitute {substitute.label}: node {agent!r} is in graph.frozen and has no other version; "
                "use silent or text:ANSWER, or leave it out of --nodes"
            )
