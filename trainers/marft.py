"""Trajectories to better adapters: the MARFT trainer, per action (MARFT-A) or per token (MARFT-T).

In the order of a run: `warm_up` (critic, on stored episodes), `replay` (adapters, on stored episodes), then one
`update` per on-policy round. One update, in order: leave out what cannot be trained on; recompute log-probs with the
trainer's own policy; values; advantages along D; normalise; adapters one after another, each weighted by the clipped
ratio of those already updated (HAPPO, A2PO; the paper updates one agent a round: `alternating`); then the critic.

Invariant: all randomness comes from the trainer's own generators, so that on the CPU equal inputs give equal bits.
It knows nothing of spans, graphs, stores or servers.

Shapes: _A one entry per action of the round, episode after episode, each in topological order; _U one per unit: per
action, or per decided token, as `granularity` says.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_store.records import TOOLS_OF, Episode, Reward, Trajectory
from trainers.advantages.arrays import Floats, rows_by_key
from trainers.advantages.estimate import Estimate
from trainers.advantages.returns import run_positions
from trainers.batch import ActionItem, EpisodeItem, Round, Use, episodes_to_round, forced_share, trajectories_to_round
from trainers.checks.memory_guard import failures_told
from trainers.checks.reality import check_moved
from trainers.common.free_memory import give_back_card_memory
from trainers.common.workers import Workers
from trainers.config import TrainerOptions
from trainers.credit.action_credits import Credited, round_to_credits
from trainers.credit.credit import FLAT, Credit, Fit
from trainers.credit.successes import append_successes, compared_round, is_compared_E, unpunished
from trainers.credit.units import Units
from trainers.errors import TrainError
from trainers.objective.distillation import mean_reverse_kl, options_to_distil, to_teacher
from trainers.objective.scored_round import ScoredRound, score_round, without_successes
from trainers.objective.update_order import UpdateContext, update_in_order, update_order
from trainers.offline.imitate import DIGEST_LENGTH
from trainers.offline.phases import BELOW_THRESHOLD, learn_offline
from trainers.offline.replay_gate import Gated, gate_episodes
from trainers.policies.policies import Policies
from trainers.scoring.model import Tick
from trainers.scoring.sampling import Sampling
from trainers.scoring.teacher import TeacherModel

_LESSON = "lesson"  # name of the reward that stands for: a teacher said this, or scored it
DISTIL_ON_POLICY = "distil_on_policy"  # the mode of a round that a teacher scored
_BEYOND = "replay: episode beyond {}"
_ALL_FORCED = "every token of this round was forced (its log-prob by the engine is 0)"

Progress = Callable[[str, int, int], None]


class MarftTrainer:
    """Adapters on one or more frozen base models, their critics, and their optimisers.

    Args:
        options: see `TrainerOptions`.
        model_dir: Hugging Face model directory of the base model, or one for each agent.
        agents: nodes that act by an adapter; each has its own unless `options.agents` says otherwise.
        seed: of adapters, critics and the order of minibatches.
        progress: called with (phase, done, total) as actions are processed.
        lineage: hashes of what an action of today is made with, by name; stored episodes are held against it.
        workers: the processes that share the work; None works alone.
        is_heldout: which episodes must never be learned from, besides those of the split `heldout`.
    """

    def __init__(
        self,
        options: TrainerOptions,
        model_dir: Path | Mapping[str, Path],
        agents: Sequence[str],
        seed: int,
        progress: Progress | None = None,
        lineage: Mapping[str, str] | None = None,
        workers: Workers | None = None,
        is_heldout: Callable[[Episode], bool] = lambda _: False,
    ) -> None:
        self.options = options
        self.is_heldout = is_heldout
        self.progress = progress
        self.lineage = dict(lineage or {})
        if options.system.threads is not None:
            torch.set_num_threads(options.system.threads)
        self.policies = Policies(options, model_dir, agents, seed=seed, workers=workers or Workers.alone())
        self.learners = self.policies.learners
        self.generator = torch.Generator().manual_seed(seed)
        self.replay_generator = torch.Generator().manual_seed(seed + 1)  # draws old episodes; see `draw_replay`
        self.rounds = 0  # on-policy updates so far
        model_of = {agent: self.policies.model_of(agent) for agent in self.policies.trained}
        self.credit = Credit(
            options, model_of, self.policies.trained, seed=seed, tick=self._tick, workers=self.policies.workers
        )

    def wait(self) -> None:
        """Returns when all processes that share the work have come here."""
        self.policies.workers.wait()

    def begin_from(self, adapters: Mapping[str, Path], learned_tasks: Collection[str]) -> None:
        """Another training's adapters in the place of some agents' own; what those learned from is held out no more.

        Args:
            adapters: agent -> folder.
            learned_tasks: SHA-256 in hex, of the fields of each task without its id, as JSON, and of `id ` with its id.
        """
        for agent, folder in adapters.items():
            self.policies.load_adapter(agent, folder)
            learner = self.learners.get(self.policies.adapter_of(agent))
            if learner is not None:
                learner.imitated_tasks |= {digest[:DIGEST_LENGTH] for digest in learned_tasks}

    # -- stored episodes -----------------------------------------------------------------------------------------

    @failures_told
    def warm_up(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Stored episodes to pre-trained critics, on their (discounted) team rewards, and to how far returns lie apart.

        Critics learn nothing from truncated episodes: the return that they would have had is not known. Nor where the
        options ask no critic.

        Returns:
            {"critic": see `Credit.warm_up`, "drops", "episodes", "actions", "seconds"}.
        """
        started = time.perf_counter()
        gated = self._gate(trajectories, {}, False)
        collected = self._to_round(gated.kept, "imitation")
        self.credit.note_spreads(collected)
        if self.options.uses_critic:
            self.policies.memory.expect(collected.items)
            data = collected.only(lambda episode: not episode.truncated, "episode truncated, its return unknown")
            data = data.also_dropped(gated.refused)
        else:
            data = self._to_round([], "imitation")
        critic = self.credit.warm_up(data)
        fields = {"critic": critic, "actions": len(data.items)}
        return _result(data, fields, time.perf_counter() - started)

    @failures_told
    def replay(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Stored episodes to adapters, as `offline.mode` says; see `trainers.offline.phases`.

        AdamW starts afresh afterwards: moments of these gradients do not fit those of the rounds that follow.

        Returns:
            {"mode", "agents": {name: see `learn_offline`}, "used" (actions), "drops", "episodes", "warnings",
            "seconds"}.
        """
        started = time.perf_counter()
        options = self.options.offline
        gated = Gated([], []) if options.mode == "off" else self._gate(trajectories, {}, options.needs_behaviour)
        texts: Use = "demonstration" if options.retokenise else "imitation"
        use: Use = "replay" if options.needs_behaviour else texts

        def read(refused_agents: Mapping[str, str] | None = None) -> Round:
            data = self._read(gated.kept, use, refused_agents, reward=self.options.offline_reward)
            return data.also_dropped(gated.refused)

        agents, data = learn_offline(
            read(),
            self.policies,
            self.credit,
            options=self.options,
            generator=self.generator,
            tick=self._tick,
            reread=read,
        )
        self.credit.forget()
        warnings = self._check_reality(agents) if options.mode != "off" else []
        fields = {"mode": options.mode, "agents": agents, "used": len(data.items), "warnings": warnings}
        return _result(data, fields, time.perf_counter() - started)

    @failures_told
    def distil(self, stored: Sequence[Trajectory], taught: Sequence[Trajectory]) -> dict[str, Any]:
        """One round of imitation of a teacher, on prompts that the trained policies came to (DAgger, arXiv 1011.0686).

        The adapters go on from where they are, with AdamW afresh, on all that was demonstrated so far.

        Args:
            stored: demonstrations, chosen as `replay` chooses them; `offline.mode` must be 'filtered'.
            taught: episodes whose calls have the answers of a teacher. All are imitated, whatever was earned.

        Returns:
            As `replay`, with "critic" (nothing is fitted), "replayed" 0, and "seconds" ({"score", "update"}).
        """
        started = time.perf_counter()
        offline = self.options.offline
        assert offline.mode == "filtered"
        gated = self._gate(stored, {}, False)
        texts: Use = "demonstration" if offline.retokenise else "imitation"
        shown = self._read(gated.kept, texts, reward=self.options.offline_reward).also_dropped(gated.refused)
        shown = shown.only(lambda episode: episode.reward >= offline.threshold, BELOW_THRESHOLD)
        data = shown.joined(self._read(list(map(_to_lesson, taught)), "demonstration", reward=_LESSON))
        everything = offline.model_copy(update={"threshold": -math.inf})
        agents, data = learn_offline(
            data,
            self.policies,
            self.credit,
            options=self.options.model_copy(update={"offline": everything}),
            generator=self.generator,
            tick=self._tick,
            reread=lambda _: data,
        )
        self.credit.forget()
        self.rounds += 1
        fields = {"mode": "distil", "agents": agents, "used": len(data.items), "critic": {}, "replayed": 0}
        fields["warnings"] = self._check_reality(agents)
        return _result(data, fields, {"score": None, "update": time.perf_counter() - started})

    @failures_told
    def distil_on_policy(
        self, trajectories: Sequence[Trajectory], teacher_dir: Path, *, newest: int | None = None
    ) -> dict[str, Any]:
        """One round in which a teacher scores what the trained policies said, token by token; see `distillation`.

        The teacher is in memory while it scores, and gone before the update. AdamW starts afresh afterwards.

        Args:
            trajectories: fresh ones. All are learned from, whatever was earned.
            teacher_dir: a Hugging Face model directory whose token ids mean what those of every trained agent mean.
            newest: as of `update`.

        Returns:
            As `update`, with "mode", "critic" (nothing is fitted), and for each agent that acted teacher_kl_before and
            teacher_kl: KL(policy || teacher) in nats, the mean per token, at the round's start and after all of its
            steps, on the tokens that were learned from. advantage_mean and advantage_std are in nats.

        Raises:
            TrainError: as `update`, and as `TeacherModel`; or the teacher does not fit into memory.
        """
        started = time.perf_counter()
        options = options_to_distil(self.options)
        data = self._read(list(map(_to_lesson, trajectories)), "on_policy", reward=_LESSON)
        if not data.items and data.is_all_forced:
            return {"mode": DISTIL_ON_POLICY, **self._nothing_learned(data, _ALL_FORCED, flat_groups=None)}
        self._refuse_empty(data)
        order = update_order(data, self.policies, options, rounds=self.rounds, generator=self.generator)
        scored = score_round(
            data,
            order,
            self.policies,
            options=options,
            tick_of=self._tick,
            reread=lambda _refused: data,
            newest=newest,
        )
        data = scored.data
        teacher_T = self._ask_teacher(teacher_dir, scored)
        units = Units(data, options.granularity)
        gap_T = [to_teacher(old, teacher).cpu() for old, teacher in zip(scored.old_T, teacher_T, strict=True)]
        advantage_U = torch.cat(gap_T).double().numpy()
        scored_at = time.perf_counter()
        learned = update_in_order(
            UpdateContext(
                data=data,
                scored=scored,
                units=units,
                normal=Estimate(advantage_U, {}),
                policies=self.policies,
                options=options,
                rounds=self.rounds,
                generator=self.generator,
                tick_of=self._tick,
                teacher_T=teacher_T,
            )
        )
        agents: dict[str, dict[str, Any]] = {}
        for name, rows in scored.rows_of.items():
            learner = self.policies.learners[name]
            tick = self._tick(f"new log-probs {name}", len(rows))
            new_T = dict(zip(rows, learner.logprobs([data.items[i] for i in rows], tick=tick), strict=True))
            learner.optimizer = learner.fresh_optimizer()
            for agent in self.policies.adapters[name].agents:
                agent_rows = [i for i in rows if data.items[i].agent == agent]
                items = [data.items[i] for i in agent_rows]
                agent_advantage_U = units.select(advantage_U, agent_rows)
                old, teacher = ([parts[i] for i in agent_rows] for parts in (scored.old_T, teacher_T))
                agents[agent] = {
                    **self._report(agent, items, learned, sampling=scored.sampling, advantage_U=agent_advantage_U),
                    "teacher_kl_before": mean_reverse_kl(old, old, teacher),
                    "teacher_kl": mean_reverse_kl(old, [new_T[i] for i in agent_rows], teacher),
                }
        warnings = self._check_reality(agents)
        self.rounds += 1
        fields = {
            "mode": DISTIL_ON_POLICY,
            "agents": agents,
            "critic": {},
            "order": list(order),
            "replayed": 0,
            "warnings": warnings,
        }
        seconds = {"score": scored_at - started, "update": time.perf_counter() - scored_at}
        return _result(data, fields, seconds)

    def _ask_teacher(self, teacher_dir: Path, scored: ScoredRound) -> list[Tensor]:
        """The teacher's log-probs of a round's actions, by position, on the devices of their policies."""
        items = scored.data.items
        self.policies.memory.check_teacher(teacher_dir)
        teacher = TeacherModel(teacher_dir, next(iter(self.policies.models.values())).device)
        teacher_T = teacher.logprobs(
            items,
            self.options.system.tokens_per_microbatch,
            workers=self.policies.workers,
            tick=self._tick("teacher", len(items)),
        )
        del teacher
        give_back_card_memory()
        return [logp_T.to(old_T.device) for logp_T, old_T in zip(teacher_T, scored.old_T, strict=True)]

    def draw_replay(self, samples_of: Sequence[Hashable], fresh: int) -> list[int]:
        """Which older episodes join a round of `fresh` ones: as many as `replay.share` allows, at random.

        Where the estimator compares groups, those of one group join together or not at all, and none that is alone in
        its own: it would be compared with nothing. A run with its forks is one of the fresh ones.

        The draw moves on with every call, and goes on from where it was after a checkpoint is loaded. Those drawn first
        come first: `update`, where fewer may join than were drawn, takes these.

        Args:
            samples_of: of each older episode, what it is a sample of: equal keys were played side by side.
        """
        largest_count = self._most_replayed(fresh)
        if self.credit.estimator.needs_groups:
            groups = [rows.tolist() for rows in rows_by_key(samples_of).values() if len(rows) > 1]
        else:
            groups = [[i] for i in range(len(samples_of))]
        if not largest_count:
            return []
        order = torch.randperm(len(groups), generator=self.replay_generator).tolist()
        return _whole_groups([groups[group] for group in order], largest_count)

    def draw_successes(
        self, weights: Sequence[float], fresh: int, *, tasks: Sequence[str] = (), round_tasks: Collection[str] = ()
    ) -> list[int]:
        """Which older episodes join a round of `fresh` ones for what they earned: as many as `replay.successes` allows.

        Drawn without replacement, with chances in proportion to `weights`; one of weight 0 is never drawn. The draw
        moves on with every call, and those drawn first come first, as with `draw_replay`.

        With `experimental.success_groups` the first one that is drawn of each task of the round comes before those of
        other tasks, and no second one of it joins: most of its group should be what the policy does today.

        Args:
            tasks: the task of each older episode; not looked at without groups.
            round_tasks: the tasks of the fresh episodes, likewise.
        """
        weight_N = torch.tensor(weights, dtype=torch.float64)
        positive_count = int((weight_N > 0).sum())
        count = min(positive_count, self._most_replayed(fresh))
        if not count:
            return []
        groups = self.options.experimental.success_groups and bool(round_tasks)
        drawn: list[int] = torch.multinomial(
            weight_N, positive_count if groups else count, generator=self.replay_generator
        ).tolist()
        return _grouped_first(drawn, tasks, round_tasks)[:count] if groups else drawn

    def imitable_ids(self, trajectories: Sequence[Trajectory]) -> set[str]:
        """The ids of those stored episodes that could join a round as successes: of the same game as far as their
        lineage tells, with a finite reward, and a call that can be imitated."""
        gated = self._gate(trajectories, {}, False)
        return {episode.episode_id for episode in self._to_round(gated.kept, "success").episodes}

    def _most_replayed(self, fresh: int) -> int:
        """The largest number of older episodes beside `fresh` ones that is not more than their share of all."""
        share = self.options.replay.round_share
        return math.floor(fresh * share / (1 - share) + 1e-9)  # 2 * 0.6 / 0.4 is a little less than 3 in binary

    # -- on-policy rounds ----------------------------------------------------------------------------------------

    @failures_told
    def update(
        self,
        trajectories: Sequence[Trajectory],
        replayed: Sequence[Trajectory] = (),
        credited: Credited | None = None,
        *,
        newest: int | None = None,
    ) -> dict[str, Any]:
        """One on-policy round: fresh trajectories, and a bounded share of older ones, to updated adapters and critics.

        Args:
            replayed: older ones, in the order in which `draw_replay` or, with `replay.successes`, `draw_successes`
                chose them. Where these are too many beside the fresh ones that can be learned from, the first join.
            credited: is told the advantages of every action at the end; not of a round that teaches nothing.
            newest: the version that the adapters are, of which `Action.adapter_version` may be an older one; None: the
                newest that the fresh trajectories name.

        Returns:
            {"agents": {name: {...}}, "critic": see `Credit.estimate`, "order" (of adapters), "drops", "episodes",
            "replayed" (episodes), "warnings", "seconds" ({"score", "update"})}. Per agent: actions, tokens (decided
            ones), forced_share (of the sampled ones), those of `objective.improve` (both of its functions), those of
            `Sampling`, advantage_mean and advantage_std (before normalisation), factor_mean (compounded ratio), lr,
            adapter_norm, adapter_moved. Agents that share an adapter share what is the adapter's. With update
            'alternating' an agent whose turn it is not has its counts only. What was not measured is None.

        A round whose groups are all without signal (skip_flat_groups), or whose tokens were all forced, teaches
        nothing, and says so in warnings.

        Raises:
            TrainError: not one action can be trained on, or training turns out not to be real (see `checks.reality`).
        """
        started = time.perf_counter()
        data = self._join(trajectories, replayed, newest=newest)
        judged = compared_round(data, self.options)
        if not judged.items and FLAT in data.drops:
            return self._nothing_learned(data, "no group of this round can say what was better", flat_groups=1.0)
        if not data.items and data.is_all_forced:
            return self._nothing_learned(data, _ALL_FORCED, flat_groups=None)
        self._refuse_empty(data)
        order = update_order(data, self.policies, self.options, rounds=self.rounds, generator=self.generator)
        scored = score_round(
            data,
            order,
            self.policies,
            options=self.options,
            tick_of=self._tick,
            reread=lambda refused: self._join(trajectories, replayed, refused, newest=newest, read=data),
            note=self.credit.note,
            newest=newest,
        )
        data = scored.data
        units = Units(data, self.options.granularity)
        estimate, normal, fit_critics = self._estimate(data, units)
        scored_at = time.perf_counter()
        learned = update_in_order(
            UpdateContext(
                data=data,
                scored=scored,
                units=units,
                normal=normal,
                policies=self.policies,
                options=self.options,
                rounds=self.rounds,
                generator=self.generator,
                tick_of=self._tick,
            )
        )
        critic = fit_critics()
        self.credit.forget()
        agents: dict[str, dict[str, Any]] = {}
        for agent in self.policies.trained:
            rows = scored.rows_of.get(self.policies.adapter_of(agent), range(len(data.items)))
            agent_rows = [i for i in rows if data.items[i].agent == agent]
            advantage_U = units.select(estimate.advantage_U, without_successes(data, agent_rows, self.options))
            agents[agent] = self._report(
                agent, [data.items[i] for i in agent_rows], learned, sampling=scored.sampling, advantage_U=advantage_U
            )
        warnings = self._check_reality(agents)
        if self.credit.estimator.needs_critic and self.options.advantage.gamma == 1 and _cut_share(data) > 0.5:
            warnings.append(
                "most episodes were cut short, and with gamma 1 their values have nothing to end on: set "
                "train.trainer.truncated_reward to 'final', or train.trainer.advantage.gamma below 1"
            )
        self.rounds += 1
        if credited is not None:
            credited(round_to_credits(data, units, estimate, normal=normal))
        fields = {
            "agents": agents,
            "critic": critic,
            "order": list(order),
            "replayed": sum(episode.replayed for episode in data.episodes),
            "warnings": warnings,
        }
        seconds = {"score": scored_at - started, "update": time.perf_counter() - scored_at}
        return _result(data, fields, seconds)

    def _refuse_empty(self, data: Round) -> None:
        """Refuses a round without an action, and one that processes hold different versions of."""
        if not data.items:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(data.drops.items()))
            raise TrainError(f"no action of this round can be trained on: {reasons or 'there were no trajectories'}")
        if self.policies.workers.count > 1:
            self.policies.workers.check_same("the round's tokens and the adapters", self._digest(data))

    def _estimate(self, data: Round, units: Units) -> tuple[Estimate, Estimate, Fit]:
        """Advantages of a round as they are in units of the reward, and normalised; and what fits the critics."""
        mode, groups = self.options.advantage.normalization, self.options.experimental.success_groups
        judged = compared_round(data, self.options)
        judged_units = Units(judged, self.options.granularity)
        estimate, fit_critics = self.credit.estimate(judged)
        normal = self.credit.normalise(estimate, judged, judged_units)
        if len(judged.items) < len(data.items):
            estimate, normal = append_successes(
                estimate,
                normal,
                data,
                units=units,
                return_A=self.credit.returns(data),
                place_A=None if self.options.advantage.gamma == 1 else run_positions(data),
                reward=self.options.reward,
                mode=mode,
                least_of=self.credit.spreads.least,
                in_deviations=self.credit.estimator.in_deviations,
                groups=groups,
            )
        if groups:
            estimate, normal = unpunished(estimate, data, units), unpunished(normal, data, units)
        return estimate, normal, fit_critics

    def teaching_episodes(self, trajectories: Sequence[Trajectory], replayed: Sequence[Trajectory] = ()) -> set[str]:
        """The ids of the fresh episodes that an update could learn something from; changes nothing.

        The others failed, have no reward or no action that can be trained on, or are in groups that cannot say what was
        better, as the estimator forms them; without groups the round is one.

        Args:
            replayed: older ones that are compared with the fresh ones. Successes are compared with nobody, but for
                those that join a group (`experimental.success_groups`).
        """
        if self.options.experimental.success_groups:
            joined = self._join(trajectories, replayed, newest=None, is_learned=False)
            data = compared_round(joined, self.options)
        else:
            data = self._to_round(trajectories, "on_policy")
            if self.credit.estimator.groups(data) is None and not self.options.replay.successes:
                older = self._to_round(replayed, "replay").episodes
                data = episodes_to_round([*data.episodes, *older], data.drops)
        telling = self.credit.informative(data).episodes
        return {episode.episode_id for episode in telling if not episode.replayed}

    def _join(
        self,
        fresh: Sequence[Trajectory],
        replayed: Sequence[Trajectory],
        refused_agents: Mapping[str, str] | None = None,
        *,
        newest: int | None,
        read: Round | None = None,
        is_learned: bool = True,
    ) -> Round:
        """Fresh and older episodes as one round; of the older ones what the gate lets through.

        Args:
            refused_agents: agent -> why its replayed actions say too little; they count as part of the environment.
            newest: as of `update`; what older calls are behind is counted from it.
            read: the round as it was with these actions, whose episodes no other joins; None: there was none.
            is_learned: False for a look at it: nothing has to fit into memory then, and no process meets others.
        """
        to_round = self._read if is_learned else self._to_round
        data = to_round(fresh, "on_policy")
        replay, groups = self.options.replay, self.options.experimental.success_groups
        skips_flat = self.options.advantage.skip_flat_groups
        if skips_flat and replay.successes and not groups:
            data = self._informative(data, read)  # before the successes join, which are in no group
        drawn_ids: list[str] = []
        if replayed:
            if replay.round_share == 0:
                raise TrainError(
                    "older episodes were given, but train.trainer.replay.share is 0, and so is "
                    "train.trainer.replay.successes: leave them out"
                )
            trained_version = {} if newest is None else dict.fromkeys(self.policies.trained, newest)
            for item in data.items:
                trained_version[item.agent] = max(trained_version.get(item.agent, 0), item.version or 0)
            gated = self._gate(replayed, trained_version, replay.successes == 0, tools=_tools_of(fresh))
            use: Use = "success" if self.options.experimental.success_traces else "replay"
            older = to_round(gated.kept, use)
            drops = {**data.drops, **gated.drops}
            for reason, count in older.drops.items():
                drops[f"replay: {reason}"] = count
            max_replayed = self._most_replayed(len(set(data.tree_E)))  # a tree counts as one run in the loss
            trajectory_by_id = {trajectory.episode.episode_id: trajectory for trajectory in gated.kept}
            older_episodes = self._within(older.episodes, trajectory_by_id, max_replayed)
            drawn_ids = [episode.episode_id for episode in older_episodes]
            # once chosen they stand as they were planned, so that no draw says which calls are learned from together
            older_episodes.sort(key=lambda episode: _planned_place(trajectory_by_id[episode.episode_id].episode))
            if len(older.episodes) > len(older_episodes):
                option = "replay.share" if replay.share else "replay.successes"
                drops[_BEYOND.format(option)] = len(older.episodes) - len(older_episodes)
            if refused_agents:
                reasons = (refused_agents.get(item.agent) for e in older_episodes for item in e.actions)
                drops |= Counter(f"replay: action: {reason}" for reason in reasons if reason is not None)
                chosen = [trajectory_by_id[e.episode_id] for e in older_episodes]
                older_episodes = list(to_round(chosen, use, refused_agents).episodes)
            data = episodes_to_round([*data.episodes, *older_episodes], drops)
        if not skips_flat or (replay.successes and not groups):
            return data
        if not groups:
            return self._informative(data, read)
        if read is not None:
            return self._informative(self._without_beyond(data, {e.episode_id for e in read.episodes}), read)
        informative = self._informative(data, None)
        return self._without_beyond(informative, self._alone_within_share(informative, drawn_ids))

    def _alone_within_share(self, data: Round, drawn_ids: Sequence[str]) -> set[str]:
        """Of the successes that are in no group those that may stay, the ones drawn first: with the flat groups fresh
        runs were left out, and older ones are a share of what is left. Those that are in a group stay."""
        fresh_trees = {tree for tree, e in zip(data.tree_E, data.episodes, strict=True) if not e.replayed}
        compared_E = is_compared_E(data, True)
        alone_ids = {e.episode_id for e, is_compared in zip(data.episodes, compared_E, strict=True) if not is_compared}
        grouped_count = sum(episode.replayed for episode in data.episodes) - len(alone_ids)
        room = max(0, self._most_replayed(len(fresh_trees)) - grouped_count)
        return set([name for name in drawn_ids if name in alone_ids][:room])

    def _without_beyond(self, data: Round, kept_ids: Collection[str]) -> Round:
        """The round without those successes that are in no group and not among these."""
        compared_E = is_compared_E(data, True)
        beyond_ids = {
            id(episode)
            for episode, is_compared in zip(data.episodes, compared_E, strict=True)
            if not is_compared and episode.episode_id not in kept_ids
        }
        return data.only(lambda episode: id(episode) not in beyond_ids, _BEYOND.format("replay.successes"))

    def _informative(self, data: Round, read: Round | None) -> Round:
        """The episodes that can say what was better, of those of `read`: what is learned from was scored there.

        Successes that are compared with nobody stay.
        """
        compared = compared_round(data, self.options)
        telling_ids = {id(episode) for episode in self.credit.informative(compared).episodes}
        flat_ids = {id(episode) for episode in compared.episodes} - telling_ids
        telling = data.only(lambda episode: id(episode) not in flat_ids, FLAT)
        if read is None:
            return telling
        chosen = {(episode.replayed, episode.episode_id) for episode in read.episodes}
        return telling.only(lambda episode: (episode.replayed, episode.episode_id) in chosen, FLAT)

    def _within(
        self, episodes: Sequence[EpisodeItem], trajectory_by_id: Mapping[str, Trajectory], largest_count: int
    ) -> list[EpisodeItem]:
        """As many older episodes as may join, those drawn first; where the estimator compares groups, whole ones of a
        task and round."""
        if not self.credit.estimator.needs_groups or self.options.replay.successes:
            return list(episodes[:largest_count])
        stored_episodes = [trajectory_by_id[episode.episode_id].episode for episode in episodes]
        groups = rows_by_key([(episode.task_id, episode.round) for episode in stored_episodes]).values()
        return [episodes[i] for i in _whole_groups([rows.tolist() for rows in groups], largest_count)]

    def _nothing_learned(self, data: Round, reason: str, flat_groups: float | None) -> dict[str, Any]:
        """A round in which every group earned the same, or nothing was decided: it counts, and moves nothing."""
        self.rounds += 1
        no_fit: dict[str, Any] = {"value_loss": None, "explained_variance": None, "critics": {}, "agents": {}}
        fields = {
            "agents": {},
            "critic": {**no_fit, "flat_groups": flat_groups},
            "order": [],
            "replayed": 0,
            "warnings": [f"{reason}, so nothing was learned"],
        }
        return _result(data, fields, {"score": None, "update": None})

    def _report(
        self,
        agent: str,
        items: Sequence[ActionItem],
        learned: Mapping[str, Mapping[str, Any]],
        sampling: Mapping[str, Sampling],
        advantage_U: Floats,
    ) -> dict[str, Any]:
        name = self.policies.adapter_of(agent)
        tokens = sum(len(item.decided) for item in items)
        counts = {"adapter": name, "actions": len(items), "tokens": tokens, "forced_share": forced_share(items)}
        if name not in learned:
            return counts
        return {
            **counts,
            **learned[name],
            **sampling[agent].metrics(),
            "advantage_mean": float(advantage_U.mean()) if len(advantage_U) else None,
            "advantage_std": float(advantage_U.std()) if len(advantage_U) else None,
        }

    # -- shared by all -------------------------------------------------------------------------------------------

    def _read(
        self,
        trajectories: Sequence[Trajectory],
        use: Use,
        refused_agents: Mapping[str, str] | None = None,
        reward: str | None = None,
    ) -> Round:
        data = self._to_round(trajectories, use, refused_agents, reward=reward)
        self.policies.memory.expect(data.items)
        return data

    def _to_round(
        self,
        trajectories: Sequence[Trajectory],
        use: Use,
        refused_agents: Mapping[str, str] | None = None,
        reward: str | None = None,
    ) -> Round:
        policies, options = self.policies, self.options
        vocabulary = {agent: policies.model_of(agent).vocabulary for agent in policies.trained}
        # a reward of another name only chooses what is imitated
        shaping = options.shaping if reward in (None, options.reward) else ()
        return trajectories_to_round(
            trajectories,
            policies.trained,
            reward or options.reward,
            vocabulary=vocabulary,
            use=use,
            shaping=shaping,
            final=options.truncated_reward == "final",
            is_heldout=self.is_heldout,
            refused=refused_agents,
            side_of=options.side_of,
        )

    def _gate(
        self,
        trajectories: Sequence[Trajectory],
        newest: Mapping[str, int],
        needs_behaviour: bool,
        tools: Mapping[str, str] | None = None,
    ) -> Gated:
        today = {**self.lineage, **(tools or {})}
        return gate_episodes(
            trajectories, today, self.options.replay, newest_version=newest, needs_behaviour=needs_behaviour
        )

    def _check_reality(self, agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Errors where training was not real, and what is odd about it; agents that share an adapter count as one."""
        self.policies.check_frozen()
        adapters: dict[str, dict[str, Any]] = {}
        for metrics in agents.values():
            if "steps" in metrics:  # it was the adapter's turn
                tokens = adapters.get(metrics["adapter"], {}).get("tokens", 0)
                adapters[metrics["adapter"]] = {**metrics, "tokens": tokens + metrics["tokens"]}
        return check_moved(adapters, {name: metrics["lr"] for name, metrics in adapters.items()})

    def _digest(self, data: Round) -> list[float]:
        """Numbers that differ where processes hold different rounds or adapters."""
        tokens = [sum(item.prompt_ids) + sum(item.sampled_ids) for item in data.items]
        return [
            float(len(data.items)),
            float(sum(tokens)),
            sum(episode.rewards.total for episode in data.episodes),
            *(self.policies.adapter_norm(agent) for agent in self.policies.agents),
        ]

    def _tick(self, phase: str, total: int) -> Tick:
        done = 0

        def tick(count: int) -> None:
            nonlocal done
            done += count
            if self.progress is not None:
                self.progress(phase, done, total)

        return tick


def _grouped_first(drawn: Sequence[int], tasks: Sequence[str], round_tasks: Collection[str]) -> list[int]:
    """Of drawn episodes the first of each task of the round, and after them those of other tasks, in their order."""
    first_of = {tasks[i]: i for i in reversed(drawn) if tasks[i] in round_tasks}
    joining = [i for i in drawn if first_of.get(tasks[i]) == i]
    return [*joining, *(i for i in drawn if tasks[i] not in round_tasks)]


def _whole_groups(groups: Sequence[Sequence[int]], largest_count: int) -> list[int]:
    """The rows of as many groups as fit into the count, the first ones first, none of them in part."""
    kept: list[int] = []
    for rows in groups:
        if len(kept) + len(rows) <= largest_count:
            kept += rows
    return kept


def _planned_place(episode: Episode) -> tuple[bool, int, str, int, int, str]:
    """Where an older episode stands among others: rounds in their order, what was collected before them at the end."""
    played_round = episode.round or 0
    return not played_round, played_round, episode.task_id, episode.sample, episode.started_ns, episode.episode_id


def _to_lesson(trajectory: Trajectory) -> Trajectory:
    """The episode with a reward of its own, so that it counts whatever it earned."""
    lesson = Reward(trajectory.episode.episode_id, _LESSON, 1.0, source="teacher", created_ns=0)
    return replace(trajectory, rewards=(lesson,))


def _cut_share(data: Round) -> float:
    return sum(episode.truncated for episode in data.episodes) / len(data.episodes)


def _tools_of(fresh: Sequence[Trajectory]) -> dict[str, str]:
    """The tool schemas that nodes offer today, as the newest fresh episodes tell them."""
    ordered = sorted(fresh, key=lambda trajectory: trajectory.episode.started_ns)
    return {
        name: digest
        for trajectory in ordered
        for name, digest in trajectory.episode.lineage.items()
        if name.startswith(TOOLS_OF)
    }


def _result(data: Round, fields: dict[str, Any], seconds: float | Mapping[str, float | None]) -> dict[str, Any]:
    return {**fields, "drops": data.drops, "episodes": len(data.episodes), "seconds": seconds}
