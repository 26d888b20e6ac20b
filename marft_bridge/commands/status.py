"""`marft-bridge status`: a run folder -> a few lines on how far it is."""

from __future__ import annotations

from collections.abc import Sequence

from marft_bridge.common.errors import USER_ERRORS, ConfigError, StoreError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.serve import ServeOptions
from marft_bridge.live.status import read_live_lines
from marft_bridge.rewards.code import CodeOptions
from marft_bridge.runs.named_version import read_named_version
from marft_bridge.runs.run_folder import RunFolder, read_forecast, read_metrics
from marft_bridge.sandbox.programs import WALLS, Isolation, NotStarted, wall_refusal
from marft_bridge.serving.base_models import config_to_bases, is_prepared
from marft_bridge.serving.placement import Placement
from marft_bridge.serving.server_file import running_servers
from trace_store.journal import is_recorded
from trace_store.store import TraceStore

WAIT_S = 3.0  # commands hold the store for moments only


def status(config: BridgeConfig, reporter: Reporter, has_file: bool = True) -> None:
    """Prints the contents of the folder. Where another process holds the store, it says so instead of the counts.

    Args:
        has_file: whether the configuration is that of a bridge.toml, so that it says where models run; a run folder's
            own does not.

    Raises:
        ConfigError: the run folder does not exist.
    """
    folder = RunFolder(config.run_folder)
    if not folder.path.is_dir():
        raise ConfigError(f"status: there is no run folder {folder.path}; `marft-bridge collect` makes one")
    folder.refuse_unsafe()
    reporter.say(f"run folder {folder.path}")
    _say_store(folder, reporter)
    for node in config.graph.nodes:
        versions = sorted(int(p.parent.name) for p in (folder.adapters / node).glob("*/marft.json"))
        reporter.say(f"  {node}: {'adapters ' + ', '.join(map(str, versions)) if versions else 'no adapter yet'}")
    for line in (read_forecast(folder.metrics) or {"lines": []})["lines"]:
        reporter.say(f"  {line}")
    lines = read_metrics(folder.metrics)
    if lines:
        reporter.say(f"  last update: round {lines[-1]['round']} of {config.train.rounds} ({lines[-1]['phase']})")
    if (named := read_named_version(folder)) is not None:
        reporter.say(f"  best version: {named.version} of {named.newest}")
    servers = running_servers(folder)
    reporter.say(f"  server: {', '.join(address for address, _ in servers.values()) or 'none running'}")
    for line in _device_lines(config, folder) if has_file else []:
        reporter.say(f"  {line}")
    for line in read_live_lines(folder):
        reporter.say(f"  {line}")
    if (folder.path / "report.html").exists():
        reporter.say(f"  report: {folder.path / 'report.html'}")
    reporter.say(f"  programs that models write: {_walls_to_text(_required_walls(config))}")


def _device_lines(config: BridgeConfig, folder: RunFolder) -> list[str]:
    """Who has, or would have, which device; nothing where a base model is not there yet, and one line for a refusal."""
    if not is_prepared(config):
        return []
    try:
        bases = config_to_bases(config)
        running = running_servers(folder)
        options = [ServeOptions(attach=running[base.name][0]) if base.name in running else base.serve for base in bases]
        return Placement(config, bases, options, trains=True).lines()
    except USER_ERRORS as refusal:
        return [f"devices: {refusal}"]


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


def _say_store(folder: RunFolder, reporter: Reporter) -> None:
    if not is_recorded(folder.store):
        reporter.say("  no store yet")
        return
    try:
        with TraceStore.open(folder.store, read_only=True, wait_s=WAIT_S) as store:
            rows = store.sql(
                "SELECT run_id, coalesce(variant, ''), outcome, count(*) FROM episodes GROUP BY ALL ORDER BY ALL"
            )
    except StoreError as error:
        reporter.say(f"  store: {error}")
        return
    for run_id, variant, outcome, count in rows:
        reporter.say(f"  {run_id}{' ' + variant if variant else ''}: {count} episodes {outcome}")
