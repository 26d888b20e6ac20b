"""`marft-bridge collect`: training tasks -> recorded episodes of the graph as it is now, in the store.

Every node runs at version 0, an adapter that changes nothing. Resuming runs only what no finished episode answers yet.
"""

from __future__ import annotations

from marft_bridge.bases import config_to_bases
from marft_bridge.cluster.collect import refuse_unusable, requests_on_ray
from marft_bridge.config import BridgeConfig
from marft_bridge.engine import Engine, begin_run, load_app, refuse_used, still_to_run
from marft_bridge.heldout import HeldOut
from marft_bridge.progress import Reporter
from marft_bridge.rollouts import plan_episodes, task_order
from marft_bridge.run_folder import COLLECT, RunFolder
from marft_bridge.run_store import keeping_what_runs, store_up_to_date, take_in_what_ran
from trace_store.store import TraceStore


def collect(config: BridgeConfig, reporter: Reporter, resume: bool) -> None:
    """Records `collect.episodes` episodes into the run folder's store, and prints what is there.

    Raises:
        BridgeError, StoreError: see the messages; what was finished before is kept.
    """
    on_ray = config.collect.engine == "ray"
    if on_ray:
        refuse_unusable(config)
    folder = RunFolder(config.run_folder)
    app = load_app(config)
    heldout = HeldOut(app.heldout_tasks, app.task_to_input)
    bases = config_to_bases(config, reporter.say)
    folder.create()
    plan = plan_episodes(
        task_order(heldout.tasks_left_of(app.train_tasks, reporter.say), config.seed),
        config.collect.episodes,
        config.collect.samples_per_task,
        seed=config.seed,
        run_id=COLLECT,
        split="train",
        adapters=dict.fromkeys(config.graph.nodes, 0),
    )
    with folder.held_by("collect"):
        with store_up_to_date(folder, reporter) as store:
            refuse_used(store, COLLECT, "collect", folder, resume)
            begin_run(store, COLLECT, "collect", config, folder)
            requests = still_to_run(store, plan)
        if resume:
            reporter.say(f"{len(plan) - len(requests)} episodes are there, {len(requests)} to run")
        if requests:
            with keeping_what_runs(folder, reporter, "collect"):
                if on_ray:
                    requests_on_ray(config, folder, app, bases, reporter, requests)
                else:
                    with Engine(config, folder, app, bases, reporter) as engine:
                        engine.publish(dict.fromkeys(config.graph.nodes, 0))
                        engine.run(requests, "collect", config.train.trainer.reward)
        take_in_what_ran(folder, reporter, lambda store: _print_summary(config, store, reporter))


def _print_summary(config: BridgeConfig, store: TraceStore, reporter: Reporter) -> None:
    outcomes = store.sql(
        "SELECT outcome, count(*) FROM (SELECT outcome FROM episodes WHERE run_id = ? QUALIFY row_number() OVER ("
        "PARTITION BY task_id, sample ORDER BY ended_ns DESC, episode_id) = 1) GROUP BY outcome",  # the last attempts
        (COLLECT,),
    )
    rewards = store.sql(
        "SELECT r.name, avg(r.value) FROM episode_reward r JOIN episodes e USING (episode_id) "
        "WHERE e.run_id = ? GROUP BY r.name ORDER BY r.name",
        (COLLECT,),
    )
    actions, trainable, tokens = store.sql(
        "SELECT count(*), count(*) FILTER (trainable), coalesce(sum(len(sampled_ids)), 0) "
        "FROM actions JOIN episodes USING (episode_id) WHERE run_id = ?",
        (COLLECT,),
    )[0]
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes))
    means = ", ".join(f"{name} {mean:.3f}" for name, mean in rewards)
    reporter.say(f"collected {counted}; {trainable} of {actions} actions trainable, {tokens} sampled tokens")
    reporter.say(f"mean rewards: {means}; store: {config.run_folder / 'store.duckdb'}")
