"""Owns: calls that a version sampled become its KL to the base model.

- The estimator is unbiased: over a whole vocabulary its mean is the KL; a hand-worked number.
- On a real (tiny) model it agrees with the KL summed over the vocabulary; version 0 is 0; the temperature counts.
- Calls that do not tell the version's whole distribution are left out, and what remained is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import save_tiny_llama
from support.tiny_trajectory import action, trajectory

from marft_bridge.comparison.kl import _sample_comparable_calls, adapters_to_kl, kl_to_base, logprobs_to_kl
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.base_models import BaseModelSpec
from trace_store.records import Action, Trajectory
from trainers.config import LoraOptions
from trainers.scoring.model import PolicyModel

PROMPT = (3, 1, 4)
CONFIG = BridgeConfig.model_validate(
    {
        "graph": {"app": "m:b", "nodes": ["planner", "worker"], "tasks": "t.jsonl", "reward": "m:r"},
        "train": {"trainer": {"system": {"device": "cpu"}}},
    }
)


def test_one_token_is_the_hand_worked_number() -> None:
    # The version gave the token 0.5, the base 0.25: r = 1/2, r - 1 - log r = -0.5 + 0.6931.
    assert logprobs_to_kl([math.log(0.5)], [math.log(0.25)]) == pytest.approx(math.log(2) - 0.5)
    assert logprobs_to_kl([], []) is None


def test_the_mean_over_the_vocabulary_is_the_kl() -> None:
    own, base = [0.7, 0.2, 0.1], [0.2, 0.5, 0.3]
    mean = sum(p * (logprobs_to_kl([math.log(p)], [math.log(q)]) or 0) for p, q in zip(own, base, strict=True))
    assert mean == pytest.approx(sum(p * math.log(p / q) for p, q in zip(own, base, strict=True)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"))


def trained(base: Path, scale: float) -> PolicyModel:
    """A model whose adapter `it` moved by hand."""
    model = PolicyModel(base, ["it"], CONFIG.train.trainer.lora, "cpu", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.parameters("it").items():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def next_token(model: PolicyModel, adapter: str | None, temperature: float) -> torch.Tensor:
    """The distribution after PROMPT, by a plain pass."""
    with torch.no_grad():
        if adapter is None:
            with model.peft.disable_adapter():
                logits = model.peft(input_ids=torch.tensor([PROMPT])).logits[0, -1]
        else:
            model.use(adapter)
            logits = model.peft(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    logp: torch.Tensor = (logits.double() / temperature).log_softmax(-1)
    return logp


def calls(tokens: Sequence[int], temperature: float = 1.0) -> list[Action]:
    return [action("planner", [token], prompt_ids=PROMPT, temperature=temperature) for token in tokens]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_over_all_tokens_of_a_real_model_the_mean_is_its_kl(base: Path, temperature: float) -> None:
    """Every token scored once and weighed by its probability: the expectation itself, without sampling error."""
    model = trained(base, 0.05)
    own, reference = (next_token(model, adapter, temperature) for adapter in ("it", None))
    expected = float((own.exp() * (own - reference)).sum())
    assert expected > 0.01
    by_token = [kl_to_base(model, "it", calls([token], temperature), 64) or 0 for token in range(len(own))]
    assert sum(p * k for p, k in zip(own.exp().tolist(), by_token, strict=True)) == pytest.approx(expected, rel=1e-3)


def test_a_sample_of_calls_comes_near_the_kl(base: Path) -> None:
    model = trained(base, 0.05)
    own, reference = (next_token(model, adapter, 1.0) for adapter in ("it", None))
    expected = float((own.exp() * (own - reference)).sum())
    drawn = torch.multinomial(own.exp(), 4000, replacement=True, generator=torch.Generator().manual_seed(2)).tolist()
    estimate = kl_to_base(model, "it", calls(drawn), 4096)
    assert estimate == pytest.approx(expected, rel=0.1)
    assert kl_to_base(model, "it", [], 64) is None


def test_a_token_that_a_grammar_forced_is_no_sample_of_the_policy(base: Path) -> None:
    """It is read and not counted: the estimate is that of the call with it in the prompt."""
    model = trained(base, 0.05)
    forced_first = action("planner", (7, 3, 9), prompt_ids=PROMPT, logprobs=(0.0, -1.0, -1.0))
    in_prompt = action("planner", (3, 9), prompt_ids=(*PROMPT, 7))
    estimate = kl_to_base(model, "it", [forced_first], 64)
    assert estimate == pytest.approx(kl_to_base(model, "it", [in_prompt], 64), rel=1e-5)


@pytest.fixture
def registry(base: Path, tmp_path: Path) -> AdapterRegistry:
    """planner@0 and planner@1, which moved."""
    model = trained(base, 0.05)
    found = AdapterRegistry(tmp_path / "adapters", model.base_sha256)
    unmoved = PolicyModel(base, ["it"], LoraOptions(), "cpu", seed=0)
    for version, source in enumerate((unmoved, model)):
        source.save_adapter("it", found.new_folder("planner", version))
        found.register("planner", version, version - 1 if version else None, {})
    return found


def on(base: Path) -> list[BaseModelSpec]:
    return [BaseModelSpec("", base, CONFIG.serve, ("planner",))]


def episodes(version: int, *actions: Action, **changes: Any) -> list[Trajectory]:
    by_version = [action("planner", a.sampled_ids or (), prompt_ids=PROMPT, adapter_version=version) for a in actions]
    return [trajectory("t", by_version, **changes)]


def test_versions_are_loaded_for_their_own_calls(base: Path, registry: AdapterRegistry) -> None:
    first, second = calls([7, 8]), calls([9])
    by_variant = {"before": episodes(0, *first), "after": episodes(1, *first), "also": episodes(1, *second)}
    found = adapters_to_kl(CONFIG, on(base), registry, by_variant, limit=32, seed=0)
    model = trained(base, 0.05)
    assert found["planner", "before"] == (0.0, 2)
    assert found["planner", "after"] == pytest.approx((kl_to_base(model, "it", first, 64), 2))
    assert found["planner", "also"] == pytest.approx((kl_to_base(model, "it", second, 64), 1))


def test_calls_that_do_not_tell_the_whole_distribution_are_left_out(base: Path, registry: AdapterRegistry) -> None:
    good = action("planner", [7], prompt_ids=PROMPT, adapter_version=1)
    narrowed: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 5},
        {"temperature": 0.0},
        {"temperature": None},
        {"logprobs": None},
    ]
    made = [good, *(action("planner", [8], **{"prompt_ids": PROMPT, "adapter_version": 1, **n}) for n in narrowed)]
    made += [action("planner", [8], prompt_ids=PROMPT), action("hosted", [8], adapter_version=None)]
    found = adapters_to_kl(
        CONFIG,
        [BaseModelSpec("", base, CONFIG.serve, ("planner",))],
        registry,
        {"after": [trajectory("t", made)]},
        limit=32,
        seed=0,
    )
    assert list(found) == [("planner", "after")]
    assert found["planner", "after"] == pytest.approx((kl_to_base(trained(base, 0.05), "it", [good], 64), 1))


def test_a_version_with_no_call_to_go_by_has_no_estimate(base: Path, registry: AdapterRegistry) -> None:
    greedy = action("planner", [8], prompt_ids=PROMPT, adapter_version=1, temperature=0.0)
    found = adapters_to_kl(
        CONFIG,
        [BaseModelSpec("", base, CONFIG.serve, ("planner",))],
        registry,
        {"after": [trajectory("t", [greedy])]},
        limit=32,
        seed=0,
    )
    assert found == {("planner", "after"): (None, 0)}


def test_at_most_so_many_calls_are_drawn_and_a_seed_draws_the_same(base: Path, registry: AdapterRegistry) -> None:
    by_variant = {"after": episodes(1, *calls(list(range(2, 30))))}
    found = [adapters_to_kl(CONFIG, on(base), registry, by_variant, limit=4, seed=seed) for seed in (0, 0, 1)]
    assert {made["planner", "after"][1] for made in found} == {4}
    assert found[0] == found[1] != found[2]


def test_every_call_is_as_likely_to_be_drawn_as_any_other(registry: AdapterRegistry) -> None:
    """Ten calls, three drawn, 2,000 times: each 600 times, +- 3.5 standard deviations of binomial(2000, 0.3)."""
    made = episodes(1, *calls(list(range(2, 12))))
    drawn: Counter[int] = Counter()
    for seed in range(2000):
        (kept,) = _sample_comparable_calls(made, registry, "after", 3, seed).values()
        assert len({call.action_id for call in kept}) == 3
        drawn.update((call.sampled_ids or (0,))[0] for call in kept)
    assert len(drawn) == 10
    assert all(abs(count - 600) < 72 for count in drawn.values())


def test_episodes_of_another_base_model_do_not_count(base: Path, registry: AdapterRegistry) -> None:
    by_variant = {"larger": episodes(0, *calls([7]), lineage={"base": "0" * 64})}
    assert adapters_to_kl(CONFIG, on(base), registry, by_variant, limit=4, seed=0) == {}
