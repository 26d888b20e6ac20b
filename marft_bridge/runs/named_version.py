"""`best.json` of a run folder <-> the version that training names, with its evidence.

Training writes it whenever it publishes a version; commands that must choose a version take the one named there.
Invariants: one version number for all trained nodes; a folder without the file, of an older run, names none, and the
newest version of each node counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.files import write_atomically
from marft_bridge.runs.run_folder import RunFolder

BEST_TEXT = "best by training's rounds"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class VersionEvidence(_Record):
    """What is known of one version's team reward. Unit of all but counts and `above_newest`: the reward."""

    version: int = Field(ge=1)
    episodes: int = Field(ge=0)  # that it sampled
    without_result: int = Field(0, ge=0)  # of those: failed or cut short, so that they count as worst
    mean: float | None  # of those that it sampled; None without any
    estimate: float  # corrected for the tasks and smoothed over neighbouring versions
    low: float  # of its 95% interval
    high: float
    above_newest: float = Field(ge=0, le=1)  # probability that it is better than the newest; 0.5 for the newest itself


class NamedVersion(_Record):
    """The version that counts as the result of a training run, and all versions' evidence."""

    schema_version: Literal[1] = 1
    version: int = Field(ge=1)
    newest: int = Field(ge=1)  # when this was written
    reward: str
    evidence: tuple[VersionEvidence, ...] = ()  # of versions 1 to `newest`; none where nothing is known of any

    @model_validator(mode="after")
    def _numbers_agree(self) -> NamedVersion:
        if self.version > self.newest:
            raise ValueError(f"version {self.version} is after the newest, {self.newest}")
        if self.evidence and [row.version for row in self.evidence] != list(range(1, self.newest + 1)):
            raise ValueError(f"evidence is not of versions 1 to {self.newest}, in order")
        return self

    @property
    def named_evidence(self) -> VersionEvidence | None:
        """The evidence of the named version; None where nothing is known."""
        return self.evidence[self.version - 1] if self.evidence else None


def read_named_version(folder: RunFolder) -> NamedVersion | None:
    """The version that training named in this folder; None where the file is missing.

    Raises:
        ConfigError: the file is not what `write_named_version` writes.
    """
    try:
        return NamedVersion.model_validate_json(folder.best.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"{folder.best} is unreadable ({reason}); delete it, and the newest version is taken, or name a version"
        ) from None


def choose_version(named_version: NamedVersion | None, versions: Sequence[int]) -> int | None:
    """The version of a node that counts: the named one where the node has it, else its newest; None where it has none.

    Args:
        versions: of the node, ascending.
    """
    if named_version is not None and named_version.version in versions:
        return named_version.version
    return versions[-1] if versions else None


def write_named_version(folder: RunFolder, named: NamedVersion) -> None:
    """Replaces the file, 0600."""
    write_atomically(folder.best, named.model_dump_json(indent=1) + "\n")
