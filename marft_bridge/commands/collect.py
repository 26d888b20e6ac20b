"""`marft-bridge collect`: training tasks -> recorded episodes of the graph as it is now, in the store.

Every node runs at version 0, an adapter that changes nothing. Resuming runs only requests without a finished episode.
"""

from __future__ import annotations

from collections import Counter

from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.episode_plan import plan_collection, unfinished_requests
from marft_bridge.rollouts.held_out import HeldOutTasks
from marft_bridge.rollouts.ray.collect import refuse_unusable_config, run_requests_on_ray
from marft_bridge.rollouts.session import open_session
from marft_bridge.runs.ledger import begin_run, refuse_second_run
from marft_bridge.runs.run_folder import COLLECT, RunFolder
from marft_bridge.runs.run_store import open_run_store, take_in_journal, take_in_on_failure
from marft_bridge.serving.model_versions import config_to_versions
from trace_store.store import TraceStore


def collect(config: BridgeConfig, reporter: Reporter, resume: bool) -> None:
    """Records `collect.episodes` episodes into the run folder's store, and prints their outcomes and mean rewards.

    Raises:
        EpisodesFailedError: every episode failed.
        BridgeError, StoreError: see the messages; episodes that were finished before are kept.
    """
    on_ray = config.collect.engine == "ray"
    if on_ray:
        refuse_unusable_config(config)
    folder = RunFolder(config.run_folder)
    app = load_app(config)
    heldout = HeldOutTasks(app.heldout_tasks, app.task_to_input)
    versions = config_to_versions(config, folder.adapters, reporter.say)
    folder.create()
    plan = plan_collection(config, heldout.drop_held_out_tasks(app.train_tasks, reporter.say))
    with folder.lock_for("collect"):
        with open_run_store(folder, reporter) as store:
            refuse_second_run(store, COLLECT, "collect", folder=folder, resume=resume)
            begin_run(store, COLLECT, "collect", config=config, folder=folder)
            requests = unfinished_requests(store, plan)
            finished_before = len(plan) - len(requests)
        if resume:
            reporter.say(f"{finished_before} episodes are there, {len(requests)} to run")
        if requests:
            with take_in_on_failure(folder, reporter):
                if on_ray:
                    tally = run_requests_on_ray(
                        config,
                        folder,
                        app,
                        versions=versions,
                        reporter=reporter,
                        requests=requests,
                        finished_before=finished_before,
                    )
                else:
                    with open_session(config, folder, app, versions=versions, reporter=reporter) as session:
                        session.models.publish(dict.fromkeys(config.graph.nodes, 0))
                        tally = session.run(
                            requests, "collect", config.train.trainer.reward, finished_before=finished_before
                        )
                tally.refuse_if_all_failed()
        take_in_journal(folder, reporter, lambda store: _print_summary(config, store, reporter))


def _cut_answer_lines(config: BridgeConfig, store: TraceStore) -> list[str]:
    """A line for each agent of whom answers ended at the limit: an app that parses them goes another way, and may not
    say so."""
    counts = store.sql(
        "SELECT node, count(*) FILTER (finish_reason = 'length') AS cut, count(*) "
        "FROM actions JOIN episodes USING (episode_id) WHERE run_id = ? GROUP BY node HAVING cut > 0 ORDER BY node",
        (COLLECT,),
    )
    return [
        f"{cut} of {calls} answers of {node!r} were cut at the limit of tokens: sampling.max_tokens is "
        f"{config.sampling.max_tokens}, where the app sets no lower one"
        for node, cut, calls in counts
    ]


def _print_summary(config: BridgeConfig, store: TraceStore, reporter: Reporter) -> None:
    outcomes_by_reason = store.sql(
        "SELECT outcome, reason, count(*) FROM (SELECT outcome, reason FROM episodes WHERE run_id = ? QUALIFY "
        "row_number() OVER (PARTITION BY task_id, sample ORDER BY ended_ns DESC, episode_id) = 1) "  # the last attempts
        "GROUP BY outcome, reason",
        (COLLECT,),
    )
    outcomes: Counter[str] = Counter()
    for outcome, _, count in outcomes_by_reason:
        outcomes[outcome] += count
    interrupted = sum(count for _, reason, count in outcomes_by_reason if reason == "interrupted")
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
    for line in _cut_answer_lines(config, store):
        reporter.say(line)
    outcome_counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    means = ", ".join(f"{name} {mean:.3f}" for name, mean in rewards) or "none"
    reporter.say(f"collected {outcome_counts}; {trainable} of {actions} actions trainable, {tokens} sampled tokens")
    if interrupted:
        reporter.say(f"{interrupted} stopped at an interrupt: nobody answers there, so that they have no reward")
    reporter.say(f"mean rewards: {means}; store: {store.path}")
    reporter.give(
        {
            "run_folder": str(config.run_folder),
            "store": str(store.path),
            "outcomes": dict(sorted(outcomes.items())),
            "rewards": dict(rewards),
            "actions": actions,
            "trainable_actions": trainable,
            "sampled_tokens": tokens,
        }
    )
