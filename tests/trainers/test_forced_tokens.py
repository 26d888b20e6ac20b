"""Owns: a token that the engine could not but sample is context, and takes part in nothing else.

Half of the tokens of a round have the engine's log-prob 0, as those that a grammar forces, and the policy finds them
improbable:

- the round is not refused, and its gradient is that of plain autograd with these tokens masked by hand
- what is forced changes no other token's gradient
- an action all of whose tokens were forced is left out with its reason, and dependencies pass through it
- units, the critic's observations and what is kept of advantages stand at the decided tokens
- ratios, entropy, words and effective sample sizes are those of the decided tokens
- where a grammar took more than half of the policy's probability, the token counts as forced; where less, it does not
- what an older version of the adapter sampled keeps its tokens: a policy that changed is no grammar
- a narrowed choice, whose log-probs are those of the grammar, is named where it is refused
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, make_action, make_trajectory, save_tiny_llama
from support.trainer_options import trainer_options
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trace_store.records import RETOKENISED, Action, Trajectory
from trainers.batch import ActionItem, forced_share, forced_tokens, trajectories_to_round
from trainers.credit.action_credits import ActionCredit
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.scoring.masked_tokens import force_tokens, masked_tokens, open_forced

REWARDS = (0.3, -1.0, 0.5, 2.0)
LENGTHS = ((3, 4), (5, 6), (1, 2), (4, 8))  # of prompts and answers
FORCED = ((1, 2), (0, 1, 5), (0,), (0, 3, 4, 7))  # first ones, last ones, and some between
OTHERS = tuple(tuple(k for k in range(n) if k not in part) for (_, n), part in zip(LENGTHS, FORCED, strict=True))
NONE = ((), (), (), ())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def _trainer(model_dir: Path, double: bool = True, **options: Any) -> MarftTrainer:
    """With an adapter that differs from the base."""
    fields: dict[str, Any] = {
        "device": "cpu",
        "minibatch_actions": 1000,
        "normalize": "none",
        "max_grad_norm": 1e9,
    } | options
    trainer = MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed=0)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in trainer.policies.parameters("actor").items():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if double:  # so that the order of sums does not show
        trainer.policies.model.peft.double()
    trainer.policies.note_frozen()
    return trainer


def _round(trainer: MarftTrainer, forced: Sequence[Sequence[int]] = FORCED, noise: float = 0.0) -> list[Trajectory]:
    """One action an episode, with the trainer's log-probs as the engine's, up to noise, and 0 where it was forced."""
    played = []
    for k, ((prompt, sampled), part, reward) in enumerate(zip(LENGTHS, forced, REWARDS, strict=True)):
        ids = [(7 * k + 3 * i) % 32 for i in range(prompt + sampled)]
        action = make_action("actor", ids[:prompt], ids[prompt:], temperature=0.7)
        own = trainer.policies.logprobs_of("actor", [action])[0]
        logprobs = tuple(0.0 if i in part else logprob + noise * (-1) ** (i + i // 2) for i, logprob in enumerate(own))
        trajectory = make_trajectory([replace(action, logprobs=logprobs)], reward)
        played.append(replace(trajectory, episode=replace(trajectory.episode, episode_id=f"e{k}")))
    return played


def _gradient(trainer: MarftTrainer, played: Sequence[Trajectory]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The gradient of the actor's one step, before anything moved, and its figures."""
    seen: list[dict[str, torch.Tensor]] = []
    parameters = trainer.policies.parameters("actor")
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = trainer.learners["actor"].optimizer
    step = optimizer.step

    def spy() -> None:
        seen.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        step()

    optimizer.step = spy  # type: ignore[method-assign, assignment]
    figures = trainer.update(played)["agents"]["actor"]
    for name, parameter in parameters.items():
        parameter.data.copy_(before[name])
    (gradient,) = seen
    return gradient, figures


def _plain(trainer: MarftTrainer, action: Action) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all sampled tokens, and the entropy before each, from full logits of one row."""
    ids = torch.tensor([(action.prompt_ids or ()) + (action.sampled_ids or ())])
    start = len(action.prompt_ids or ())
    logp_LV = (trainer.policies.model.peft(input_ids=ids).logits[0] / (action.temperature or 1.0)).log_softmax(-1)
    logp_TV = logp_LV[start - 1 : -1]
    return logp_TV[torch.arange(len(logp_TV)), ids[0, start:]], -(logp_TV.exp() * logp_TV).sum(-1)


@pytest.mark.parametrize("granularity", ["action", "token"])
def test_an_update_is_that_of_plain_autograd_with_forced_tokens_masked_by_hand(
    model_dir: Path, granularity: str
) -> None:
    options = {"granularity": granularity, "kl_coef": 0.3, "entropy_coef": 0.05, "objective": {"weighting": "token"}}
    trainer = _trainer(model_dir, **options, mismatch_cap=1.02)
    played = _round(trainer, noise=0.05)
    gradient, figures = _gradient(trainer, played)  # with the tolerance that is the default, so it is not refused

    model, parameters = trainer.policies.model, trainer.policies.parameters("actor")
    total = sum(len(part) for part in OTHERS)
    loss = torch.zeros((), dtype=torch.float64)
    masked_entropy, ratios = 0.0, []
    for trajectory, part, reward in zip(played, OTHERS, REWARDS, strict=True):
        (action,), rows = trajectory.actions, list(part)
        model.use("actor")
        logp_T, entropy_T = (values[rows] for values in _plain(trainer, action))
        with torch.no_grad(), model.peft.disable_adapter():
            base_T = _plain(trainer, action)[0][rows]
        engine_T = torch.tensor(action.logprobs, dtype=torch.float64)[rows]
        rho_T = logp_T.detach() - engine_T
        # V of a new critic is 0, so A = R; the ratio to the policy of the start of the round is 1
        if granularity == "action":
            weight = rho_T.mean().exp().clamp(max=1.02)
            loss = loss - len(rows) / total * weight * reward * (logp_T - logp_T.detach()).mean().exp()
        else:
            weight_T = rho_T.exp().clamp(max=1.02)
            loss = loss - (weight_T * reward * (logp_T - logp_T.detach()).exp()).sum() / total
        gap_T = base_T - logp_T
        kl_T = (logp_T - logp_T.detach()).exp() * (torch.expm1(gap_T) - gap_T)
        loss = loss + (0.3 * kl_T.sum() - 0.05 * entropy_T.sum()) / total
        masked_entropy -= float(engine_T.sum()) / total
        ratios.append(rho_T.exp())
    expected = torch.autograd.grad(loss, list(parameters.values()))
    assert max(float(part.abs().max()) for part in expected) > 1e-2
    for name, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(gradient[name], value, atol=1e-6, rtol=1e-5)
    assert figures["entropy"] == pytest.approx(masked_entropy, abs=1e-6)
    assert figures["engine_ratio_max"] == pytest.approx(float(torch.cat(ratios).max()), abs=1e-6)
    assert figures["engine_logprob_gap"] == pytest.approx(0.05, abs=1e-6)
    assert (figures["tokens"], figures["forced_share"]) == (10, 0.5)


def test_what_is_forced_changes_no_other_tokens_gradient(model_dir: Path) -> None:
    """A sum over tokens: forced in one half and forced in the other add up to not forced at all."""
    options = {"logprob_norm": "sum", "mismatch": "none"}
    parts = []
    for forced in (FORCED, OTHERS, NONE):
        trainer = _trainer(model_dir, **options)
        parts.append(_gradient(trainer, _round(trainer, forced))[0])
    for name, whole in parts[2].items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], whole, atol=1e-6, rtol=1e-5)
        assert float(parts[0][name].abs().max()) > 1e-4


def test_a_grammar_decided_where_it_took_more_than_half_and_where_it_left_one_token_to_an_uncertain_policy() -> None:
    """Of the policy it allowed 0.3, 0.51, 0.4 and 0.8; of the first that is the sampled token alone."""
    read = ActionItem("actor", (9,), (1, 2, 3, 4), (math.log(0.2 / 0.51), math.log(0.1 / 0.4), -1.0), 1.0, forced=(0,))
    item = open_forced(read)
    assert (item.decided, item.behaviour) == ((0, 1, 2, 3), (0.0, *(read.behaviour or ())))
    logp_T = [math.log(0.3), math.log(0.2), math.log(0.1), -1.0 + math.log(0.8)]
    assert masked_tokens(item, logp_T) == (0, 2)
    assert masked_tokens(item, [math.log(0.95), *logp_T[1:]]) == (2,)  # the policy was certain by itself
    assert masked_tokens(replace(item, behaviour=(-0.01, *(read.behaviour or ()))), logp_T) == ()  # held by nothing
    assert masked_tokens(item, [-3.0, -5.0, -4.0, -9.0]) == (0, 1, 3)  # one is left, where it was cut least
    held = force_tokens(item, (0, 2))
    assert (held.forced, held.decided, held.behaviour) == ((0, 2), (1, 3), (math.log(0.2 / 0.51), -1.0))
    assert force_tokens(item, ()) == item


def test_a_token_that_the_policy_is_certain_of_stays_in_its_loss_and_its_kl(model_dir: Path) -> None:
    """Or an update could take it away, and no ratio, clip or KL would say so."""
    trainer = _trainer(model_dir)
    trainer.policies.model.use("actor")
    ids = [3, 1, 4]
    for _ in range(2):
        ids.append(int(trainer.policies.model.peft(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    certain = make_action("actor", ids[:3], ids[3:], temperature=1e-5, logprobs=(0.0, -1e-9))
    assert forced_tokens(certain) == (0,)
    played = [make_trajectory([certain], 1.0)]
    figures = trainer.update(played)["agents"]["actor"]
    assert (figures["tokens"], figures["forced_share"]) == (2, 0.0)


def test_an_update_under_a_grammar_is_that_without_the_tokens_that_it_decided(model_dir: Path) -> None:
    """The policy leans out of it at some tokens, by 2 nats each: beyond the tolerance, and yet not refused."""
    first = [part[:1] for part in FORCED]
    gradients = []
    for rest in (0.0, 2.0):  # forced outright, or among several
        trainer = _trainer(model_dir)
        played = []
        for trajectory, forced, part in zip(_round(trainer, first), first, FORCED, strict=True):
            (action,) = trajectory.actions
            raised = [
                logp if k in forced or k not in part else (logp + rest if rest else 0.0)
                for k, logp in enumerate(action.logprobs or ())
            ]
            played.append(replace(trajectory, actions=(replace(action, logprobs=tuple(raised)),)))
        gradients.append(_gradient(trainer, played))
    (forced_gradient, forced_figures), (gradient, figures) = gradients
    for name, part in gradient.items():
        torch.testing.assert_close(part, forced_gradient[name], atol=0, rtol=0)
    assert figures["kl_after"] == pytest.approx(forced_figures["kl_after"])
    assert (figures["tokens"], figures["forced_share"]) == (forced_figures["tokens"], 0.5)


@pytest.mark.parametrize(
    ("versions", "newest", "tokens"),
    [
        ((None, None, None, None), None, 10),
        ((2, 2, 2, 2), None, 10),  # the newest that the round names
        ((2, 2, 2, 2), 2, 10),
        ((1, 1, 1, 1), 2, 16),  # a round that was played ahead
        ((1, 1, 2, 2), None, 13),  # beside calls of an earlier round
        ((1, 1, 2, 2), 3, 16),
    ],
)
def test_a_token_of_an_older_version_that_became_less_likely_is_not_taken_for_a_grammars(
    model_dir: Path, versions: Sequence[int | None], newest: int | None, tokens: int
) -> None:
    """The engine's log-prob of the first forced token of each call is 0, and that of the others 2 nats above ours."""
    trainer = _trainer(model_dir, engine_tolerance=1e3)
    played = []
    for trajectory, part, version in zip(_round(trainer, NONE), FORCED, versions, strict=True):
        (action,) = trajectory.actions
        raised = {k: (action.logprobs or ())[k] + 2.0 for k in part[1:]} | {part[0]: 0.0}
        logprobs = tuple(raised.get(k, logprob) for k, logprob in enumerate(action.logprobs or ()))
        own = replace(action, logprobs=logprobs, adapter_version=version)
        played.append(replace(trajectory, actions=(own,)))
    assert trainer.update(played, newest=newest)["agents"]["actor"]["tokens"] == tokens


def test_only_a_log_prob_of_exactly_0_under_the_whole_distribution_is_forced() -> None:
    action = make_action("actor", [1], [2, 3, 4, 5], logprobs=(0.0, -1e-7, -0.0, -2.0))
    assert forced_tokens(action) == (0, 2)
    for changes in ({"temperature": 0.0}, {"temperature": None}, {"top_p": 0.9}, {"top_k": 1}, {"logprobs": None}):
        assert forced_tokens(replace(action, **changes)) == (), changes  # type: ignore[arg-type]


def test_what_no_engine_sampled_keeps_all_tokens() -> None:
    known = make_action("actor", [1], [2, 3], logprobs=(0.0, -1.0))
    texts = replace(known, logprobs=None, trainable=False, untrainable_reason=RETOKENISED)
    trajectories = [make_trajectory([known, texts], 1.0)]
    items = trajectories_to_round(trajectories, AGENTS, "reward", dict.fromkeys(AGENTS, 32), "demonstration").items
    assert [(item.decided, item.behaviour) for item in items] == [((1,), (-1.0,)), ((0, 1), None)]
    assert forced_share(items) == 0.25
    assert forced_share(()) is None


def test_a_forced_tail_is_not_even_read() -> None:
    item = ActionItem("actor", (9, 8), (1, 2, 3, 4, 5), (-1.0, -1.0, -1.0), 1.0, forced=(0, 4))
    assert (item.decided, item.decided_ids) == ((1, 2, 3), (2, 3, 4))
    assert item.input_ids == (9, 8, 1, 2, 3)  # what stands before token 3, the last decided one
    assert item.columns == (2, 3, 4)
    assert replace(item, forced=(1, 2)).decided_stretches == [(1,), (4, 5)]


def test_an_action_without_a_decision_is_left_out_and_dependencies_pass_through_it() -> None:
    first, last = (make_action("actor", [1], [2, 3], logprobs=(-1.0, 0.0)) for _ in range(2))
    between = make_action("reasoner", [1], [2, 3], logprobs=(0.0, 0.0))
    trajectory = make_trajectory([first, between, last], 1.0)
    for use in ("on_policy", "replay", "imitation"):
        data = trajectories_to_round([trajectory], AGENTS, "reward", dict.fromkeys(AGENTS, 32), use)  # type: ignore[arg-type]
        assert data.drops == {"action: every token was forced": 1}
        assert data.episodes[0].action_ids == ("0", "2")
        assert data.episodes[0].successors == ((1,), ())


def test_a_round_without_a_decision_teaches_nothing_and_one_that_lacks_log_probs_is_refused(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    forced = make_action("actor", [1], [2, 3], logprobs=(0.0, 0.0))
    result = trainer.update([make_trajectory([forced, replace(forced, node="judge")], 1.0)])
    assert result["warnings"] == [
        "every token of this round was forced (its log-prob by the engine is 0), so nothing was learned"
    ]
    assert (result["agents"], result["critic"]["flat_groups"], trainer.rounds) == ({}, None, 1)
    unknown = replace(forced, logprobs=None, trainable=False, untrainable_reason="no log-probs")
    with pytest.raises(TrainError, match=r"no action of this round .* 1 x action: every token was forced"):
        trainer.update([make_trajectory([forced, unknown], 1.0)])


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])  # with it the pass of the base model is the critic's too
@pytest.mark.parametrize("granularity", ["action", "token"])
def test_the_critic_observes_what_stands_before_each_decided_token(
    model_dir: Path, granularity: str, kl_coef: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(model_dir, granularity=granularity, kl_coef=kl_coef)
    played = _round(trainer)
    cut = [replace(t, episode=replace(t.episode, outcome="truncated", reason="test")) for t in played[:2]]
    observations: list[Any] = []
    observe = trainer.credit._team.observe
    monkeypatch.setattr(
        trainer.credit._team,
        "observe",
        lambda *asked: observations.append(observe(*asked)) or observations[-1],
    )
    credited: list[ActionCredit] = []
    trainer.update([*cut, *played[2:]], credited=credited.extend)
    (observed,) = observations
    backbone = trainer.policies.model
    expected = []
    for trajectory, part in zip(played, OTHERS, strict=True):
        (action,) = trajectory.actions
        ids = torch.tensor([(action.prompt_ids or ()) + (action.sampled_ids or ())])
        with torch.no_grad(), backbone.peft.disable_adapter():
            hidden_LH = backbone.peft(input_ids=ids, output_hidden_states=True).hidden_states[-1][0].float()
        before_first = len(action.prompt_ids or ()) - 1
        expected.append(hidden_LH[[before_first + k for k in (part if granularity == "token" else (0,))]])
    features_NF = observed.views["shared/0"].features_NF
    torch.testing.assert_close(features_NF, torch.cat(expected), atol=1e-5, rtol=1e-5)
    units = [part if granularity == "token" else None for part in OTHERS]
    assert [credit.token_U for credit in credited] == units
    assert [len(credit.advantage_U) for credit in credited] == [1 if part is None else len(part) for part in units]
    # V = 0: the two that ended earn their reward, at every unit
    for credit, reward in zip(credited[2:], REWARDS[2:], strict=True):
        assert credit.advantage_U.tolist() == [pytest.approx(reward)] * len(credit.advantage_U)


@pytest.mark.parametrize("learn", ["replay", "update"])
def test_ratios_to_what_was_sampled_are_those_of_decided_tokens(model_dir: Path, learn: str) -> None:
    trainer = _trainer(model_dir, False, offline={"mode": "importance", "ratio_cap": 5.0})
    figures = getattr(trainer, learn)(_round(trainer))["agents"]["actor"]
    assert figures["effective_sample_size"] == pytest.approx(1.0)
    assert (figures["tokens"], figures["forced_share"]) == (10, 0.5)


def test_stored_actions_are_weighed_by_the_ratio_of_their_decided_tokens(model_dir: Path) -> None:
    """At ratio 1 the coefficient of importance sampling is the advantage, here the reward, since V of a new critic is
    0, in units of how far the rewards lie apart: 3."""
    trainer = _trainer(
        model_dir, False, offline={"mode": "importance", "ratio_cap": 5.0, "epochs": 1, "minibatch_actions": 1000}
    )
    figures = trainer.replay(_round(trainer))["agents"]["actor"]
    assert figures["coefficient_mean"] == pytest.approx(sum(REWARDS) / 4 / 3, abs=1e-6)


def test_words_are_those_of_the_decided_tokens(tmp_path: Path) -> None:
    model_dir = save_tiny_llama(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model_dir)
    norms = {}
    for norm in ("sum", "word"):
        trainer = _trainer(model_dir, logprob_norm=norm)
        (_, played, *_) = _round(trainer)  # six tokens, three of them decided, each a word
        norms[norm] = trainer.update([played])["agents"]["actor"]["grad_norm"]
    assert norms["sum"] == pytest.approx(3 * norms["word"], rel=1e-4)


@pytest.mark.parametrize(("shift", "is_named"), [((1.0, 1.0), True), ((1.0, -1.0), False)])
def test_a_choice_that_a_grammar_narrowed_is_named_where_it_is_refused(
    model_dir: Path, shift: tuple[float, float], is_named: bool
) -> None:
    """A grammar only ever raises log-probs; another model's are off both ways."""
    trainer = _trainer(model_dir)
    played = [
        make_trajectory(
            [replace(a, logprobs=tuple(x + shift[i % 2] for i, x in enumerate(a.logprobs or ()))) for a in t.actions],
            1.0,
        )
        for t in _round(trainer, NONE)
    ]
    with pytest.raises(TrainError, match=r"differ from the trainer's by 1\.000 nats a token") as refusal:
        trainer.update(played)
    text = "higher by 1.000 on average, as where an output is constrained to several tokens (response_format"
    assert (text in str(refusal.value)) == is_named
    assert "\n" not in str(refusal.value)
