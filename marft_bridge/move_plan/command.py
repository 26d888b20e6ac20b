"""`marft-bridge plan`: a store of an app's runs -> what each node does, costs and is like, and which to move first.

The store is read, a local model (where one is named) scores and probes drawn calls while the store is closed, and what
was predicted is written into the store, where that is a file. Invariants: without a model everything else is done, and
what was left out is said; nothing that a model needs is loaded before it is needed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.extras import install_command, is_installed, require_trainer
from marft_bridge.common.progress import Reporter
from marft_bridge.config.prices import PriceTable, file_to_prices
from marft_bridge.move_plan.answers import NodeAnswers, store_to_answers
from marft_bridge.move_plan.considered import count_episodes
from marft_bridge.move_plan.drawn_calls import DrawnCall, draw_calls, nodes_of
from marft_bridge.move_plan.predictions import calibrate, plan_to_predictions
from marft_bridge.move_plan.proposal import NodeFacts, propose
from marft_bridge.move_plan.reward_links import RewardLinks, choose_reward, store_to_links
from marft_bridge.move_plan.tables import Plan, calibration_to_json, plan_to_json, print_calibration, print_plan
from marft_bridge.move_plan.tool_calls import count_tool_calls
from marft_bridge.move_plan.usage import NodeUsage, store_to_usage
from marft_bridge.runs.ledger import numbered_run_id
from marft_bridge.runs.run_folder import RunFolder, bridge_version
from marft_bridge.runs.run_store import WAIT_S
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.readers import CATALOG_SUFFIX
from trace_store.records import RunRow
from trace_store.store import TraceStore

if TYPE_CHECKING:
    from marft_bridge.config.bridge import BridgeConfig
    from marft_bridge.move_plan.probe_figures import NodeFit

NO_MODEL = "none"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of the command line."""

    prices: Path | None = None
    model: str | None = None  # None: that of [model], where a configuration names one; NO_MODEL: none
    calls: int = 48  # drawn per node, at most
    metric: str | None = None  # None: train.trainer.reward, or the only reward there is
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read of the store."""

    episodes: int
    left_out: Mapping[str, int]
    usage: Sequence[NodeUsage]
    answers: Mapping[str, NodeAnswers]
    links: RewardLinks
    calls: Sequence[DrawnCall]
    missing: Sequence[str]


def plan(path: Path, config: BridgeConfig | None, options: PlanOptions, reporter: Reporter) -> None:
    """Makes the plan of a store, prints it, and keeps its predictions.

    Args:
        path: of the store, or of an export, which is only read.
        config: of the run, where there is one: its models, rewards and adapters.

    Raises:
        ConfigError: there is no call to look at; the model or the price file cannot be used.
        StoreError, TrainError: see the messages.
    """
    prices = None if options.prices is None else file_to_prices(options.prices, "plan --prices")
    with open_for_reading(path) as store:
        read = _read_store(store, config, options, prices=prices)
    if not read.usage:
        raise ConfigError(
            f"plan: {path} holds no call of a node in a run of the app itself; record some, or take traces in with "
            "`marft-bridge ingest`"
        )
    missing = list(read.missing)
    fits: Mapping[str, NodeFit] = {}
    model_dirs = _find_models(nodes_of(read.calls), config, options, missing=missing, reporter=reporter)
    if model_dirs:
        fits = _probe(read.calls, model_dirs, config, options=options, reporter=reporter)
    facts = [
        NodeFacts(u, read.answers.get(u.node), links=read.links.nodes[u.node], fit=fits.get(u.node)) for u in read.usage
    ]
    if costless := sorted(
        {m.model or "a model that is not named" for u in read.usage for m in u.models if m.currency is None}
    ):
        missing.append(f"cost of calls by {', '.join(costless)}: no price is known; --prices names a file that has it")
    proposal = propose(facts)
    run_id = None
    if path.is_dir() or path.suffix == CATALOG_SUFFIX:
        missing.append("predictions are not kept: an export is only read")
    else:
        config_note = {
            "model": sorted({directory.name for directory in model_dirs.values()}),
            "calls": options.calls,
            "seed": options.seed,
            "reward": read.links.reward,
        }
        with TraceStore.open(path, wait_s=WAIT_S, on_wait=reporter.say) as store:
            store.take_in()
            run_id = numbered_run_id(store, "plan", resume=False)
            now_ns = time.time_ns()
            store.put_run(RunRow(run_id, "plan", now_ns, config={"plan": config_note}, version=bridge_version()))
            store.put_predictions(plan_to_predictions(run_id, facts, proposal, now_ns=now_ns))
            if prices is not None:
                prices.put_into(store)
    made = Plan(
        store=str(path),
        run_id=run_id,
        episodes=read.episodes,
        left_out=read.left_out,
        drawn_calls=options.calls,
        seed=options.seed,
        facts=facts,
        links=read.links,
        proposal=proposal,
        missing=missing,
    )
    print_plan(made, reporter)
    reporter.give(plan_to_json(made))


def show_calibration(path: Path, outcome: Path, reporter: Reporter) -> None:
    """Prints the predictions of a store, and what training and comparing in the run folder `outcome` measured since.

    Raises:
        ConfigError, StoreError: see the messages.
    """
    if not outcome.is_dir():
        raise ConfigError(f"plan --calibration: there is no run folder {outcome}; name that of `train` and `compare`")
    with open_for_reading(path) as store:
        predictions = store.predictions()
    with open_for_reading(RunFolder(outcome).store) as store:
        adapters = store.adapters()
    rows, orders = calibrate(predictions, adapters, outcome / "report.json")
    print_calibration(rows, orders, reporter)
    reporter.give(calibration_to_json(str(path), rows, orders))


def _read_store(
    store: TraceStore, config: BridgeConfig | None, options: PlanOptions, prices: PriceTable | None
) -> _Read:
    missing = []
    usage = store_to_usage(store, prices)
    reward, names = choose_reward(store, options.metric, usual=None if config is None else config.train.trainer.reward)
    if options.metric is not None and reward is None:
        raise ConfigError(
            f"plan --metric: no run of the app has a reward {options.metric!r}; there are: {', '.join(names) or 'none'}"
        )
    if reward is None:
        remedy = f"name one of {', '.join(names)} with --metric" if names else "the runs have none"
        missing.append(f"what hangs on each node's answers: {remedy}")
    episodes, left_out = count_episodes(store)
    calls = draw_calls(store, options.calls, options.seed)
    return _Read(
        episodes=episodes,
        left_out=left_out,
        usage=usage,
        answers=store_to_answers(store, count_tool_calls(calls)),
        links=store_to_links(store, [row.node for row in usage], reward, seed=options.seed),
        calls=calls,
        missing=missing,
    )


def _find_models(
    nodes: Sequence[str],
    config: BridgeConfig | None,
    options: PlanOptions,
    *,
    missing: list[str],
    reporter: Reporter,
) -> dict[str, Path]:
    """Node -> the directory of its local base model; none where none is named, which is added to `missing`."""
    title = "how well a local model predicts the answers, and what imitation would do"
    has_config = config is not None and "model" in config.model_fields_set
    if options.model == NO_MODEL or (options.model is None and not has_config):
        missing.append(f"{title}: no local model; name one with --model")
        return {}
    if options.model is None and not is_installed("torch"):
        missing.append(f"{title}: torch is not installed; {install_command('train')}")
        return {}
    require_trainer("plan --model")
    if not nodes:
        missing.append(f"{title}: no hosted call of a run that came to its end")
        return {}
    from marft_bridge.config.models import ModelOptions
    from marft_bridge.serving.base_models import config_to_bases, directory_of, prepare_directory

    if options.model is not None:
        model_options = ModelOptions() if config is None else config.model
        return dict.fromkeys(nodes, prepare_directory(options.model, model_options, reporter.say))
    assert config is not None
    bases = config_to_bases(config, reporter.say)
    return {node: directory_of(bases, node) for node in nodes}


def _probe(
    calls: Sequence[DrawnCall],
    model_dirs: Mapping[str, Path],
    config: BridgeConfig | None,
    options: PlanOptions,
    reporter: Reporter,
) -> Mapping[str, NodeFit]:
    from marft_bridge.move_plan.local_calls import calls_to_local
    from marft_bridge.move_plan.probe import probe_nodes
    from trainers.config import TrainerOptions

    trainer = TrainerOptions() if config is None else config.train.trainer
    local = calls_to_local(calls, model_dirs)
    with reporter.bars(), reporter.task("probe", len(local)) as task:
        fits = probe_nodes(local, model_dirs, trainer, seed=options.seed, on_node=task.update)
        task.update(len(local))
    return fits
