"""`[compare]` and the command line's versions -> the teams to run: their graphs, models and adapter versions.

Invariants: the first team is the base; a team's versions exist; no two teams would run the same thing, so the teams
between base and candidate (mixed teams) never repeat either of them; in a tournament every two variants meet on both
seats; no server has to hold more adapters at once than it has room for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.hub_names import model_to_pinned
from marft_bridge.comparison.mixed import differing_nodes, mixed_teams
from marft_bridge.config.bridge import BridgeConfig, GraphOptions
from marft_bridge.config.compare import BEST, VariantOptions, Version
from marft_bridge.config.serve import ServeOptions
from marft_bridge.runs.named_version import BEST_TEXT
from marft_bridge.serving.adapter_registry import AdapterRegistry

BEFORE_VARIANT, AFTER_VARIANT = "before", "after"  # where no variants are declared


@dataclass(frozen=True, slots=True)
class Deployment:
    """The graph of a team and the base model under it.

    Teams of equal `key` share an opened graph, and those of one model a server.
    """

    graph: GraphOptions
    model: str | None = None  # path of another base model than the configuration's
    serve: ServeOptions | None = None  # how that other model is served
    own_models: bool = False  # the graph calls the models that it was written with

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two deployments that run the same graph on the same model."""
        graph = self.graph
        runs = json.dumps(self.run_content(), sort_keys=True, default=str)
        return (graph.app, graph.nodes, graph.frozen, graph.task_to_input, runs, self.model, self.own_models)

    @property
    def pinned_model(self) -> str | None:
        """The other model, with the commit of a name of the Hub."""
        return None if self.model is None else model_to_pinned(self.model)

    def run_content(self) -> dict[str, Any]:
        """How its graph is run, where the configuration says so, as JSON values."""
        return self.graph.model_dump(mode="json", include={"context", "config"}, exclude_none=True)


@dataclass(frozen=True, slots=True)
class Team:
    """One variant, declared or mixed, with its deployment and its adapter versions resolved."""

    name: str
    deployment: Deployment
    adapters: Mapping[str, int] = field(default_factory=dict)  # node -> version; frozen nodes are at 0 always
    choice: str | None = None  # why these versions, where training named them
    prompts: Mapping[str, str] = field(default_factory=dict)  # node -> what its calls begin with instead
    max_tokens: int | None = None  # of one call; None: as [sampling] says

    @property
    def setup(self) -> tuple[Any, ...]:
        """Equal for two teams that differ in nothing but their names and adapter versions."""
        return (*self.deployment.key, tuple(sorted(self.prompts.items())), self.max_tokens)

    def content(self) -> dict[str, Any]:
        """The team as JSON values, which a resumed comparison must equal."""
        graph = self.deployment.graph
        return {
            "name": self.name,
            "app": graph.app,
            "task_to_input": graph.task_to_input,
            "frozen": list(graph.frozen),
            "model": self.deployment.pinned_model,
            "own_models": self.deployment.own_models,
            "adapters": dict(self.adapters),
            **({"prompts": dict(self.prompts)} if self.prompts else {}),
            **({} if self.max_tokens is None else {"max_tokens": self.max_tokens}),
            **self.deployment.run_content(),
        }


@dataclass(frozen=True, slots=True)
class Seating:
    """Two variants on the two sides of a game: one plays the first side, the other the second."""

    first: str
    second: str
    team: Team


@dataclass(frozen=True, slots=True)
class Lineup:
    """All teams of one comparison: the base, the candidates, and those in which nodes of two of them act together."""

    teams: tuple[Team, ...]  # the base first, then the candidates
    mixed_teams: Mapping[frozenset[str], Team] = field(default_factory=dict)  # nodes as in the candidate -> team
    mixed_candidate: str | None = None
    mixed_nodes: tuple[str, ...] = ()  # that differ between the base and that candidate
    seatings: tuple[Seating, ...] = ()  # of a tournament: every two teams on both seats

    @property
    def base(self) -> Team:
        """The team that every other team is compared with."""
        return self.teams[0]

    @property
    def candidates(self) -> tuple[Team, ...]:
        """All but the base."""
        return self.teams[1:]

    @property
    def mixed_only_teams(self) -> tuple[Team, ...]:
        """The mixed teams that are no variants of their own."""
        declared = {team.name for team in self.teams}
        return tuple(team for team in self.mixed_teams.values() if team.name not in declared)

    @property
    def own_teams(self) -> tuple[Team, ...]:
        """Every team that runs, without those of a tournament, in which two variants play against each other."""
        return (*self.teams, *self.mixed_only_teams)

    @property
    def all_teams(self) -> tuple[Team, ...]:
        """Every team that runs, in their order on each task."""
        return (*self.own_teams, *(seating.team for seating in self.seatings))


def options_to_lineup(
    config: BridgeConfig,
    registry: AdapterRegistry,
    before_version: int | None = None,
    after_version: Version | None = None,
    named_version: int | None = None,
    opponents: Sequence[Version] = (),
) -> Lineup:
    """`[compare]`, and the flags --before, --after and --opponents, into the teams.

    Args:
        registry: of the adapters of the configuration's base model.
        before_version, after_version: of every node where no variants are declared; None: 0 and the best.
        opponents: further versions of every node, each a variant of its own, all of which play each other. One that is
            the same as another variant is that one. Variants that are declared play too.
        named_version: what `best` stands for; None: each node's newest.

    Raises:
        ConfigError: a name, a node or two teams do not fit; the server would have to hold too many adapters.
        ServingError: a version does not exist.
    """
    tables = config.compare.variants
    if opponents:
        _refuse_no_tournament(config)
    if tables and (before_version is not None or after_version is not None):
        raise ConfigError("compare: --before and --after have no effect beside [[compare.variants]]; leave them out")
    if not tables:
        after: Version = BEST if after_version is None else after_version
        base = VariantOptions(name=BEFORE_VARIANT, adapters=before_version or 0)
        tables = (base, VariantOptions(name=AFTER_VARIANT, adapters=after))
    teams = tuple(_table_to_team(config, table, registry, named_version=named_version) for table in tables)
    _refuse_repeated(teams)
    if opponents:
        lineup = _add_opponents(config, teams, opponents, registry=registry, named_version=named_version)
    else:
        lineup = _add_mixed_teams(config, teams)
    _refuse_too_many_adapters(config, lineup.all_teams)
    return lineup


def _table_to_team(
    config: BridgeConfig, table: VariantOptions, registry: AdapterRegistry, named_version: int | None
) -> Team:
    deployment = _table_to_deployment(config, table)
    _refuse_unknown_prompts(config, table)
    if deployment.own_models:
        return Team(table.name, deployment, prompts=table.prompts)
    nodes = deployment.graph.nodes
    declared = table.adapters
    requested: Mapping[str, Version] = declared if isinstance(declared, dict) else dict.fromkeys(nodes, declared)
    if unknown := sorted(set(requested) - set(nodes)):
        raise ConfigError(
            f"compare.variants {table.name!r}: adapters: {unknown[0]!r} is not one of its nodes: {', '.join(nodes)}"
        )
    requested, best_nodes = _resolve_best(requested, named_version)
    versions = {node: _version(registry, node, requested.get(node, 0), variant=table.name) for node in nodes}
    choice = f"{', '.join(best_nodes)}: {BEST_TEXT}" if 0 < len(best_nodes) < len(nodes) else BEST_TEXT
    return Team(
        table.name,
        deployment,
        versions,
        choice=choice if best_nodes else None,
        prompts=table.prompts,
        max_tokens=None if table.max_tokens == config.sampling.max_tokens else table.max_tokens,
    )


def _refuse_unknown_prompts(config: BridgeConfig, table: VariantOptions) -> None:
    """Refuses a prompt of a node that the graph lacks. All nodes are known of the graph of `[graph]` only."""
    nodes = (*config.graph.nodes, *config.graph.frozen)
    if table.app is None and (unknown := sorted(set(table.prompts) - set(nodes))):
        raise ConfigError(
            f"compare.variants {table.name!r}: prompts: {unknown[0]!r} is not in graph.nodes or graph.frozen: "
            f"{', '.join(nodes)}"
        )


def _resolve_best(
    requested: Mapping[str, Version], named_version: int | None
) -> tuple[Mapping[str, Version], Sequence[str]]:
    """The versions with `best` as the named one, and the nodes that asked for it; unchanged where none is named."""
    if named_version is None:
        return requested, ()
    best_nodes = [node for node, version in requested.items() if version == BEST]
    return {**requested, **dict.fromkeys(best_nodes, named_version)}, best_nodes


def _table_to_deployment(config: BridgeConfig, table: VariantOptions) -> Deployment:
    changes: dict[str, Any] = {}
    if table.app is not None:
        changes = {"app": table.app, "nodes": table.nodes, "frozen": table.frozen}
        inherited = {name: getattr(table, name) for name in ("task_to_input", "context", "config")}
        changes |= {name: value for name, value in inherited.items() if value is not None}
    elif table.own_models:  # its agents keep their names, and call their own models
        changes = {"nodes": (*config.graph.nodes, *config.graph.frozen), "frozen": ()}
    other_model = table.model if table.model != config.model.path else None
    if other_model is None and table.serve is not None:
        raise ConfigError(
            f"compare.variants {table.name!r}: serve has no effect: {table.model!r} is the model of [model]"
        )
    return Deployment(config.graph.model_copy(update=changes), other_model, table.serve, own_models=table.own_models)


def _version(registry: AdapterRegistry, node: str, requested: Version, variant: str) -> int:
    if requested == 0:
        return 0  # is made when it is missing
    if isinstance(requested, int):
        return registry.get(node, requested).version
    newest = registry.latest(node)
    if newest is None or newest.version == 0:
        raise ConfigError(
            f"compare: node {node!r} has no trained adapter, so variant {variant!r} has no newest one; "
            "run `marft-bridge train` first"
        )
    return newest.version


def _refuse_repeated(teams: Sequence[Team]) -> None:
    names_by_setup: dict[tuple[Any, ...], str] = {}
    for team in teams:
        key = (team.setup, _versions(team))
        if (first_name := names_by_setup.setdefault(key, team.name)) != team.name:
            raise ConfigError(
                f"compare: {first_name!r} and {team.name!r} would run the same thing ({_describe_team(team)}); "
                "change one of them, or leave it out"
            )


def describe_choice(team: Team) -> str:
    """The versions of a team and why these, as `version 5 (best by training's rounds)`."""
    versions = set(team.adapters.values())
    versions_text = ", ".join(f"{node}@{version}" for node, version in team.adapters.items())
    return f"{f'version {versions.pop()}' if len(versions) == 1 else versions_text} ({team.choice})"


def _describe_team(team: Team) -> str:
    prompts = f", prompts of {', '.join(team.prompts)}" if team.prompts else ""
    limit = "" if team.max_tokens is None else f", max_tokens {team.max_tokens}"
    if team.deployment.own_models:
        return f"{team.deployment.graph.app} on its own models{prompts}"
    versions = ", ".join(f"{node}@{version}" for node, version in team.adapters.items())
    suffix = f" on {team.deployment.model}" if team.deployment.model else ""
    return f"{team.deployment.graph.app} with {versions}{suffix}{prompts}{limit}"


# -- a tournament ---------------------------------------------------------------------------------------------


def _refuse_no_tournament(config: BridgeConfig) -> None:
    options, sides = config.compare, config.train.trainer.sides
    if len(sides) != 2:
        raise ConfigError(
            f"compare --opponents: a tournament is between two sides, and train.trainer.sides names {len(sides)}; "
            "name the two, or leave --opponents out"
        )
    unfit_options = {"mixed_candidate": options.mixed_candidate is not None, "stop_early": options.stop_early}
    for option, is_set in unfit_options.items():
        if is_set:
            raise ConfigError(f"compare --opponents does not go with compare.{option}: leave one of them out")


def _add_opponents(
    config: BridgeConfig,
    teams: Sequence[Team],
    opponents: Sequence[Version],
    *,
    registry: AdapterRegistry,
    named_version: int | None,
) -> Lineup:
    players = list(teams)
    for opponent in opponents:
        table = VariantOptions(name=f"version {opponent}", adapters=opponent)
        player = _table_to_team(config, table, registry, named_version=named_version)
        _refuse_other_players(teams, player)
        if _versions(player) not in map(_versions, players):
            players.append(player)
    return Lineup(tuple(players), seatings=tuple(_seatings(config, players)))


def _refuse_other_players(teams: Sequence[Team], opponent: Team) -> None:
    """Refuses variants that are no adapter versions of the configuration alone, or are called as another opponent."""
    for team in teams:
        if team.setup != opponent.setup:
            raise ConfigError(
                f"compare --opponents: variant {team.name!r} has a graph, model, prompts or max_tokens of its own, and "
                "a tournament is between adapter versions: take its table out of [[compare.variants]], or leave "
                "--opponents out"
            )
        if team.name == opponent.name and _versions(team) != _versions(opponent):
            raise ConfigError(f"compare.variants: {team.name!r} is the name of an opponent; choose another")


def _seatings(config: BridgeConfig, players: Sequence[Team]) -> Iterator[Seating]:
    """Every two players on both seats. A node of no side acts as in the base."""
    (first_side, first_nodes), (second_side, second_nodes) = config.train.trainer.sides.items()
    base = players[0]
    for first, second in itertools.permutations(players, 2):
        versions = {
            node: (first if node in first_nodes else second if node in second_nodes else base).adapters[node]
            for node in base.adapters
        }
        name = f"{first.name} as {first_side}, {second.name} as {second_side}"
        yield Seating(first.name, second.name, Team(name, base.deployment, versions))


# -- mixed teams ----------------------------------------------------------------------------------------------


def _add_mixed_teams(config: BridgeConfig, teams: tuple[Team, ...]) -> Lineup:
    if config.compare.mixed_teams == "off":
        return Lineup(teams)
    base, requested = teams[0], config.compare.mixed_candidate
    obstacles = {team.name: _mixing_obstacle(base, team) for team in teams[1:]}
    if requested is not None and obstacles[requested] is not None:
        raise ConfigError(
            f"compare.mixed_candidate: {requested!r} cannot be mixed with {base.name!r}: {obstacles[requested]}"
        )
    mixable = [team for team in teams[1:] if obstacles[team.name] is None and requested in (None, team.name)]
    if not mixable:
        return Lineup(teams)
    candidate = mixable[0]
    nodes = differing_nodes(base.adapters, candidate.adapters)
    teams_by_versions = {_versions(team): team for team in teams if team.setup == base.setup}
    teams_by_swapped = {}
    for swapped in mixed_teams(nodes):
        versions = {node: (candidate if node in swapped else base).adapters[node] for node in base.adapters}
        name = _mixed_name(base.name, candidate.name, nodes, swapped=swapped)
        declared = teams_by_versions.get(tuple(sorted(versions.items())))
        teams_by_swapped[swapped] = declared or replace(base, name=name, adapters=versions, choice=None)
    mixed_names = {team.name for team in teams_by_swapped.values() if team not in teams}
    if clashing_names := sorted(mixed_names & {team.name for team in teams}):
        raise ConfigError(f"compare.variants: {clashing_names[0]!r} is the name of a mixed team; choose another")
    return Lineup(teams, teams_by_swapped, candidate.name, mixed_nodes=nodes)


def _mixing_obstacle(base: Team, candidate: Team) -> str | None:
    if base.deployment.own_models or base.deployment.key != candidate.deployment.key:
        return "they do not share a graph and a served model"
    if base.prompts != candidate.prompts:
        return "they have other prompts"
    if base.max_tokens != candidate.max_tokens:
        return "they have another max_tokens"
    if len(differing_nodes(base.adapters, candidate.adapters)) < 2:
        return "they differ in one node only, which is what their comparison shows"
    return None


def _mixed_name(base: str, candidate: str, nodes: Sequence[str], swapped: frozenset[str]) -> str:
    """`before+actor`; where all nodes but one of many are swapped, `after-actor`."""
    unswapped = [node for node in nodes if node not in swapped]
    if len(swapped) > 1 and len(unswapped) == 1:
        return f"{candidate}-{unswapped[0]}"
    return "+".join([base, *(node for node in nodes if node in swapped)])


def _versions(team: Team) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(team.adapters.items()))


# -- room in a server -----------------------------------------------------------------------------------------


def live_versions(teams: Iterable[Team]) -> dict[str, list[int]]:
    """Teams of one server -> node -> the adapter versions that it must serve at the same time."""
    live: dict[str, set[int]] = {}
    for team in teams:
        for node, version in (*team.adapters.items(), *((node, 0) for node in team.deployment.graph.frozen)):
            live.setdefault(node, set()).add(version)
    return {node: sorted(versions) for node, versions in live.items()}


def teams_by_server(teams: Iterable[Team]) -> dict[str | None, list[Team]]:
    """Model -> its teams; None is the configuration's model. Teams on their own models are in none."""
    teams_by_model: dict[str | None, list[Team]] = {}
    for team in teams:
        if not team.deployment.own_models:
            teams_by_model.setdefault(team.deployment.model, []).append(team)
    return teams_by_model


def other_model_serve_options(config: BridgeConfig, teams: Sequence[Team]) -> ServeOptions:
    """The serve options of another base model: its table's, else those of [serve] on a free port."""
    declaring = [team for team in teams if team.deployment.serve is not None]
    if conflicting := [team for team in declaring if team.deployment.serve != declaring[0].deployment.serve]:
        raise ConfigError(
            f"compare.variants: {declaring[0].name!r} and {conflicting[0].name!r} are served by one server and say "
            "differently how; let their tables `serve` agree, or leave one out"
        )
    if declaring and declaring[0].deployment.serve is not None:
        return declaring[0].deployment.serve
    return ServeOptions() if config.serve.attach is not None else config.serve.model_copy(update={"port": None})


def _refuse_too_many_adapters(config: BridgeConfig, teams: Sequence[Team]) -> None:
    for model, model_teams in teams_by_server(teams).items():
        live = live_versions(model_teams)
        if model is not None:
            _refuse_too_many("serve", other_model_serve_options(config, model_teams), live)
            continue
        for name, options in config.models.items():
            node_versions = {node: live.pop(node) for node in options.nodes if node in live}
            _refuse_too_many(f"models.{name}.serve", options.serve, node_versions)
        _refuse_too_many("serve", config.serve, live)


def _refuse_too_many(table: str, options: ServeOptions, live: Mapping[str, Sequence[int]]) -> None:
    needed = sum(map(len, live.values()))
    if options.attach is None and needed > options.max_loras:
        parts = "; ".join(f"{node} at {', '.join(map(str, versions))}" for node, versions in live.items())
        raise ConfigError(
            f"{table}.max_loras is {options.max_loras}, but the variants need {needed} adapters at once ({parts}); "
            "raise it, or compare fewer"
        )
