"""Options and flags -> the teams that run: who plays on which graph, model and versions, before anything starts.

Invariants: the first team is the base; a team's versions exist; no two teams would run the same thing, so the teams
between base and candidate (mixed teams) never repeat either of them; a server is never asked to hold more adapters at
once than it has room for. It knows neither episodes nor servers that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.adapters import AdapterRegistry
from marft_bridge.comparison.mixed import differing_nodes, mixed_teams
from marft_bridge.comparison.options import VariantOptions, Version
from marft_bridge.config import BridgeConfig, GraphOptions
from marft_bridge.errors import ConfigError
from marft_bridge.server_command import ServeOptions

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True)
class Stands:
    """What a team's graph runs on. Teams that agree in it share a graph, and those of one model a server."""

    graph: GraphOptions
    model: str | None = None  # another base model than the configuration's
    serve: ServeOptions | None = None  # how that one is served
    own_models: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides whether two are the same."""
        graph = self.graph
        return (graph.app, graph.nodes, graph.frozen, graph.task_to_input, self.model, self.own_models)


@dataclass(frozen=True, slots=True)
class Team:
    """One variant with everything resolved."""

    name: str
    on: Stands
    adapters: Mapping[str, int] = field(default_factory=dict)  # node -> version; frozen nodes are at 0 always

    def content(self) -> dict[str, Any]:
        """As JSON values: what a resumed comparison must find again."""
        graph = self.on.graph
        return {
            "name": self.name,
            "app": graph.app,
            "task_to_input": graph.task_to_input,
            "frozen": list(graph.frozen),
            "model": self.on.model,
            "own_models": self.on.own_models,
            "adapters": dict(self.adapters),
        }


@dataclass(frozen=True, slots=True)
class Lineup:
    """All teams of one comparison: the base first, then the candidates; and those between the base and one of them."""

    teams: tuple[Team, ...]
    mixed: Mapping[frozenset[str], Team] = field(default_factory=dict)  # nodes as in the candidate -> who plays it
    mixed_candidate: str | None = None
    mixed_nodes: tuple[str, ...] = ()

    @property
    def base(self) -> Team:
        """With which every other team is compared."""
        return self.teams[0]

    @property
    def candidates(self) -> tuple[Team, ...]:
        """All but the base."""
        return self.teams[1:]

    @property
    def between(self) -> tuple[Team, ...]:
        """The teams that run only for the sake of the mixture."""
        named = {team.name for team in self.teams}
        return tuple(team for team in self.mixed.values() if team.name not in named)

    @property
    def all(self) -> tuple[Team, ...]:
        """Every team that runs, in the order in which they follow each other on a task."""
        return (*self.teams, *self.between)


def options_to_lineup(
    config: BridgeConfig, registry: AdapterRegistry, before: int | None = None, after: int | None = None
) -> Lineup:
    """`[compare]`, and the flags --before and --after, into the teams.

    Args:
        registry: of the configuration's base model.
        before, after: versions of every node where no variants are declared; None: 0 and each node's newest.

    Raises:
        ConfigError: a name, a node or two teams do not fit; the server would have to hold too many adapters.
        ServingError: a version does not exist.
    """
    tables = config.compare.variants
    if tables and (before is not None or after is not None):
        raise ConfigError("compare: --before and --after have no effect beside [[compare.variants]]; leave them out")
    if not tables:
        newest: Version = "newest" if after is None else after
        tables = (VariantOptions(name=BEFORE, adapters=before or 0), VariantOptions(name=AFTER, adapters=newest))
    teams = tuple(_team(config, table, registry) for table in tables)
    _refuse_repeated(teams)
    lineup = _with_mixed(config, teams)
    _refuse_too_many_adapters(config, lineup.all)
    return lineup


def _team(config: BridgeConfig, table: VariantOptions, registry: AdapterRegistry) -> Team:
    on = _stands(config, table)
    if on.own_models:
        return Team(table.name, on)
    nodes = on.graph.nodes
    given = table.adapters
    wanted: Mapping[str, Version] = given if isinstance(given, dict) else dict.fromkeys(nodes, given)
    if strange := sorted(set(wanted) - set(nodes)):
        raise ConfigError(
            f"compare.variants {table.name!r}: adapters: {strange[0]!r} is not one of its nodes: {', '.join(nodes)}"
        )
    versions = {node: _version(registry, node, wanted.get(node, 0), table.name) for node in nodes}
    return Team(table.name, on, versions)


def _stands(config: BridgeConfig, table: VariantOptions) -> Stands:
    changes: dict[str, Any] = {}
    if table.app is not None:
        changes = {"app": table.app, "nodes": table.nodes, "frozen": table.frozen}
        changes |= {"task_to_input": table.task_to_input} if table.task_to_input is not None else {}
    elif table.own_models:  # its agents keep their names, and call their own models
        changes = {"nodes": (*config.graph.nodes, *config.graph.frozen), "frozen": ()}
    other = table.model if table.model != config.model.path else None
    if other is None and table.serve is not None:
        raise ConfigError(
            f"compare.variants {table.name!r}: serve has no effect: {table.model!r} is the model of [model]"
        )
    return Stands(config.graph.model_copy(update=changes), other, table.serve, table.own_models)


def _version(registry: AdapterRegistry, node: str, wanted: Version, variant: str) -> int:
    if wanted == 0:
        return 0  # is made when it is missing
    if isinstance(wanted, int):
        return registry.get(node, wanted).version
    newest = registry.latest(node)
    if newest is None or newest.version == 0:
        raise ConfigError(
            f"compare: node {node!r} has no trained adapter, so variant {variant!r} has no newest one; "
            "run `marft-bridge train` first"
        )
    return newest.version


def _refuse_repeated(teams: Sequence[Team]) -> None:
    seen: dict[tuple[Any, ...], str] = {}
    for team in teams:
        what = (*team.on.key, tuple(sorted(team.adapters.items())))
        if (other := seen.setdefault(what, team.name)) != team.name:
            raise ConfigError(
                f"compare: {other!r} and {team.name!r} would run the same thing ({_described(team)}); "
                "change one of them, or leave it out"
            )


def _described(team: Team) -> str:
    if team.on.own_models:
        return f"{team.on.graph.app} on its own models"
    versions = ", ".join(f"{node}@{version}" for node, version in team.adapters.items())
    return f"{team.on.graph.app} with {versions}" + (f" on {team.on.model}" if team.on.model else "")


# -- mixed teams ----------------------------------------------------------------------------------------------


def _with_mixed(config: BridgeConfig, teams: tuple[Team, ...]) -> Lineup:
    if config.compare.mixed_teams == "off":
        return Lineup(teams)
    base, wanted = teams[0], config.compare.mixed_candidate
    reasons = {team.name: _why_not_mixed(base, team) for team in teams[1:]}
    if wanted is not None and reasons[wanted] is not None:
        raise ConfigError(f"compare.mixed_candidate: {wanted!r} cannot be mixed with {base.name!r}: {reasons[wanted]}")
    possible = [team for team in teams[1:] if reasons[team.name] is None and wanted in (None, team.name)]
    if not possible:
        return Lineup(teams)
    candidate = possible[0]
    nodes = differing_nodes(base.adapters, candidate.adapters)
    known = {_versions(team): team for team in teams if team.on.key == base.on.key}
    mixed = {}
    for on in mixed_teams(nodes):
        versions = {node: (candidate if node in on else base).adapters[node] for node in base.adapters}
        name = _mixed_name(base.name, candidate.name, nodes, on)
        mixed[on] = known.get(tuple(sorted(versions.items()))) or Team(name, base.on, versions)
    if taken := sorted({team.name for team in mixed.values() if team not in teams} & {team.name for team in teams}):
        raise ConfigError(f"compare.variants: {taken[0]!r} is the name of a mixed team; choose another")
    return Lineup(teams, mixed, candidate.name, nodes)


def _why_not_mixed(base: Team, candidate: Team) -> str | None:
    if base.on.own_models or base.on.key != candidate.on.key:
        return "they do not share a graph and a served model"
    if len(differing_nodes(base.adapters, candidate.adapters)) < 2:
        return "they differ in one node only, which is what their comparison shows"
    return None


def _mixed_name(base: str, candidate: str, nodes: Sequence[str], on: frozenset[str]) -> str:
    """`before+actor`; where one is taken out of many, `after-actor`."""
    off = [node for node in nodes if node not in on]
    if len(on) > 1 and len(off) == 1:
        return f"{candidate}-{off[0]}"
    return "+".join([base, *(node for node in nodes if node in on)])


def _versions(team: Team) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(team.adapters.items()))


# -- room in a server -----------------------------------------------------------------------------------------


def live_versions(teams: Iterable[Team]) -> dict[str, list[int]]:
    """Teams of one server -> node -> the versions that it must answer as, all at once."""
    live: dict[str, set[int]] = {}
    for team in teams:
        for node, version in (*team.adapters.items(), *((node, 0) for node in team.on.graph.frozen)):
            live.setdefault(node, set()).add(version)
    return {node: sorted(versions) for node, versions in live.items()}


def by_server(teams: Iterable[Team]) -> dict[str | None, list[Team]]:
    """Model -> its teams; None is the configuration's model. Teams on their own models have no server."""
    found: dict[str | None, list[Team]] = {}
    for team in teams:
        if not team.on.own_models:
            found.setdefault(team.on.model, []).append(team)
    return found


def other_models_options(config: BridgeConfig, teams: Sequence[Team]) -> ServeOptions:
    """How another base model is served: as its table says, else as [serve] does, on a free port."""
    given = [team for team in teams if team.on.serve is not None]
    if other := [team for team in given if team.on.serve != given[0].on.serve]:
        raise ConfigError(
            f"compare.variants: {given[0].name!r} and {other[0].name!r} are served by one server and say differently "
            "how; let their tables `serve` agree, or leave one out"
        )
    if given and given[0].on.serve is not None:
        return given[0].on.serve
    return ServeOptions() if config.serve.attach is not None else config.serve.model_copy(update={"port": None})


def _refuse_too_many_adapters(config: BridgeConfig, teams: Sequence[Team]) -> None:
    for model, those in by_server(teams).items():
        live = live_versions(those)
        if model is not None:
            _refuse_too_many("serve", other_models_options(config, those), live)
            continue
        for name, other in config.models.items():
            its = {node: live.pop(node) for node in other.nodes if node in live}
            _refuse_too_many(f"models.{name}.serve", other.serve, its)
        _refuse_too_many("serve", config.serve, live)


def _refuse_too_many(table: str, options: ServeOptions, live: Mapping[str, Sequence[int]]) -> None:
    needed = sum(map(len, live.values()))
    if options.attach is None and needed > options.max_loras:
        parts = "; ".join(f"{node} at {', '.join(map(str, versions))}" for node, versions in live.items())
        raise ConfigError(
            f"{table}.max_loras is {options.max_loras}, but the variants need {needed} adapters at once ({parts}); "
            "raise it, or compare fewer"
        )
