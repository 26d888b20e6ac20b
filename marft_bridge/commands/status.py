"""`marft-bridge status`: a run folder -> a few lines on how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marft_bridge.common.errors import USER_ERRORS, ConfigError, StoreError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.serve import ServeOptions
from marft_bridge.live.status import read_live_lines
from marft_bridge.rewards.code import CodeOptions
from marft_bridge.runs.device_lines import LIVE, SERVE, read_devices
from marft_bridge.runs.imitation_lines import updates_to_imitation_lines
from marft_bridge.runs.named_version import read_named_version
from marft_bridge.runs.run_folder import RunFolder, read_forecast, read_metrics
from marft_bridge.sandbox.programs import WALLS, Isolation, NotStarted, wall_refusal
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.base_models import config_to_bases, is_prepared
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.server_file import running_servers
from trace_store.journal import is_recorded
from trace_store.store import TraceStore

WAIT_S = 3.0  # commands hold the store for moments only


def status(config: BridgeConfig, reporter: Reporter) -> None:
    """Prints the contents of the folder. Where another process holds the store, it says so instead of the counts.

    Raises:
        ConfigError: the run folder does not exist.
    """
    folder = RunFolder(config.run_folder)
    if not folder.path.is_dir():
        raise ConfigError(f"status: there is no run folder {folder.path}; `marft-bridge collect` makes one")
    folder.refuse_unsafe()
    lines = read_metrics(folder.metrics)
    named = read_named_version(folder)
    registry = AdapterRegistry(folder.adapters, "")  # of whatever base model: only the versions are listed
    report_page = folder.path / "report.html"
    walls_text = _walls_to_text(_required_walls(config))
    state: dict[str, Any] = {
        "run_folder": str(folder.path),
        "store": None,
        "episodes": None,
        "adapters": {node: registry.versions(node) for node in config.graph.nodes},
        "forecast": (read_forecast(folder.metrics) or {"lines": []})["lines"],
        "imitation": updates_to_imitation_lines(lines),
        "last_update": {key: lines[-1][key] for key in ("round", "phase")} if lines else None,
        "rounds": config.train.rounds,
        "best": None if named is None else {"version": named.version, "newest": named.newest},
        "servers": [address for address, _ in running_servers(folder).values()],
        "devices": _device_lines(config, folder),
        "live": read_live_lines(folder),
        "report": str(report_page) if report_page.exists() else None,
        "walls": walls_text,
    }
    reporter.say(f"run folder {folder.path}")
    if is_recorded(folder.store):
        state["store"] = str(folder.store)
        state["episodes"] = _say_store(folder, reporter)
    else:
        reporter.say("  no store yet")
    for node, versions in state["adapters"].items():
        reporter.say(f"  {node}: {'adapters ' + ', '.join(map(str, versions)) if versions else 'no adapter yet'}")
    for line in [*state["forecast"], *state["imitation"]]:
        reporter.say(f"  {line}")
    if (update := state["last_update"]) is not None:
        reporter.say(f"  last update: round {update['round']} of {config.train.rounds} ({update['phase']})")
    if named is not None:
        reporter.say(f"  best version: {named.version} of {named.newest}")
    reporter.say(f"  server: {', '.join(state['servers']) or 'none running'}")
    for line in [*state["devices"], *state["live"]]:
        reporter.say(f"  {line}")
    if state["report"] is not None:
        reporter.say(f"  report: {report_page}")
    reporter.say(f"  programs that models write: {walls_text}")
    reporter.give(state)


def _device_lines(config: BridgeConfig, folder: RunFolder) -> list[str]:
    """Who has which device, as those that run said; and who would have which if `train` began now, unless a command is
    at work that keeps it out. Nothing of that where a base model is not there yet, and one line for a refusal."""
    lines_by_name = read_devices(folder)
    lines = [line for said in lines_by_name.values() for line in said]
    if lines_by_name.keys() - {SERVE, LIVE} or not is_prepared(config):
        return lines
    try:
        bases = config_to_bases(config)
        running = running_servers(folder)
        options = [ServeOptions(attach=running[base.name][0]) if base.name in running else base.serve for base in bases]
        plays_here = config.train.rollouts == "local"
        planned = Placement(config, bases, options, trains=True, serves_here=plays_here).lines()
    except USER_ERRORS as refusal:
        return [*lines, f"devices: `train` would be refused now: {refusal}"]
    return [*lines, *(line.replace("devices:", "devices that `train` would have now:", 1) for line in planned)]


def _required_walls(config: BridgeConfig) -> list[Isolation]:
    """The walls that the rewards of the configuration name."""
    names = [reward.isolation for reward in config.rewards if isinstance(reward, CodeOptions)]
    return [wall for wall in dict.fromkeys(names) if wall is not None]


def _walls_to_text(required: Sequence[Isolation] = ()) -> str:
    """Behind which wall this machine runs untrusted programs, which others it has, and why it lacks the rest.

    Args:
        required: what the configuration names, in place of the strongest.
    """
    try:
        refusals = {wall: wall_refusal(wall) for wall in WALLS}
    except NotStarted as reason:
        return str(reason)
    held = [wall for wall, refusal in refusals.items() if refusal is None]
    used = [*required] or held[:1]
    text = f"behind {' and '.join(map(repr, used))}" if used else "refused, since no wall holds here"
    spare = [wall for wall in held if wall not in used]
    return "; ".join(
        [
            text + (", as the configuration says" if required else ""),
            *([f"this machine also has {' and '.join(map(repr, spare))}"] if spare else []),
            *(f"not {wall!r}: {refusal}" for wall, refusal in refusals.items() if refusal is not None),
        ]
    )


def _say_store(folder: RunFolder, reporter: Reporter) -> list[dict[str, Any]] | None:
    """Prints the episodes of the store by run and outcome; None where it cannot be read now."""
    try:
        with TraceStore.open(folder.store, read_only=True, wait_s=WAIT_S) as store:
            rows = store.sql(
                "SELECT run_id, coalesce(variant, ''), outcome, count(*) FROM episodes GROUP BY ALL ORDER BY ALL"
            )
    except StoreError as error:
        reporter.say(f"  store: {error}")
        return None
    for run_id, variant, outcome, count in rows:
        reporter.say(f"  {run_id}{' ' + variant if variant else ''}: {count} episodes {outcome}")
    return [
        {"run": run_id, "variant": variant or None, "outcome": outcome, "episodes": count}
        for run_id, variant, outcome, count in rows
    ]
