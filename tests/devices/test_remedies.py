"""Owns: what does not fit on the cards is refused in one line with numbers, and the setting that it names does fit.

- A table of cards, models and options, as a command would be refused.
- Where no setting helps, the way out is a smaller model, a larger card, or an emptier one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.card_rig import FOUR_BIT, SAVING, SIDE_BY_SIDE, machine_of, place, pretend_cuda, write_model

from marft_bridge.common.errors import ServingError


@pytest.fixture(autouse=True)
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


SEVEN = [0, 1, 2, 3, 4, 5, 6]
REFUSED: list[tuple[str, str, dict[str, Any], str, dict[str, Any] | None]] = [
    # machine, model, options, what is said, and what then fits
    (
        *("1 x 8", "1.7B", {}),
        r"server of serve needs 5\.0 GiB of card 0 .*, and 3\.5 GiB are there for it, beside training with 3\.9 GiB: "
        r"take a smaller base model, a card with 9\.7 GiB or more",
        None,
    ),
    (
        *("1 x 24", "8B", {}),
        r"needs 16\.9 GiB of card 0 .* one call of 1,024 tokens .*beside training with 15\.7 GiB",
        None,
    ),
    (
        *("4 x 80", "32B", {}),
        r"training needs about 82\.1 GiB of card 1 .*, and 72\.8 GiB are there for it: set "
        r"train\.trainer\.system\.tokens_per_microbatch to \d+ or less, or .*activation_checkpointing = true",
        SAVING,
    ),
    (
        *("8 x 80", "70B", {}),
        r"training needs about 163\.2 GiB of card 2 .*: free memory, take a smaller base model, or set "
        r"train\.trainer\.system\.load_in_4bit and activation_checkpointing to true$",
        FOUR_BIT | SAVING,
    ),
    (
        *("2 x 24", "8B", {"serve.max_model_len": 65536, **SAVING}),
        r"one call of 65,536 tokens .*: set serve\.max_model_len to 43152 or less",
        {"serve.max_model_len": 43152},
    ),
    (
        *("2 x 24", "1.7B", {"serve.kv_cache_gib": 20.0}),
        r"for 20 GiB of KV cache .*: set serve\.kv_cache_gib to 17\.2 or less",
        {"serve.kv_cache_gib": 17.2},
    ),
    (
        *("2 x 24", "1.7B", {"serve.kv_cache_gib": 0.5, "serve.max_model_len": 8192}),
        r"one call of 8,192 tokens .*: set serve\.kv_cache_gib to 1\.5 or more",
        {"serve.kv_cache_gib": 1.5},
    ),
    (
        *("1 x 24", "1.7B", {"serve.gpu_memory_utilization": 0.9}),
        r"0\.9 is 21\.6 GiB of card 0 .*, and 19\.7 GiB are there .* beside training with 3\.9 GiB: "
        r"set it to 0\.82 or less",
        {"serve.gpu_memory_utilization": 0.82},
    ),
    (
        *("2 x 24", "1.7B", {"serve.gpu_memory_utilization": 0.1}),
        r"needs 5\.0 GiB .*: set serve\.gpu_memory_utilization to 0\.22 or more",
        {"serve.gpu_memory_utilization": 0.22},
    ),
    (
        *("8 x 80", "8B", {"serve.devices": SEVEN}),
        r"32 attention heads, 8 of them for keys, cannot be split over 7 cards: "
        r"set serve\.tensor_parallel = 1, for 7 copies of the model",
        {"serve.tensor_parallel": 1},
    ),
    (
        *("4 x 80", "8B", {"serve.tensor_parallel": 3}),
        r"cannot be split over 3 cards: set serve\.tensor_parallel = 2$",
        {"serve.tensor_parallel": 2},
    ),
    (
        *("4 x 80", "8B", {"serve.tensor_parallel": 8}),
        r"serve\.tensor_parallel is 8, but 3 of 4 cards are free for it: set it to 4$",
        {"serve.tensor_parallel": 4},
    ),
    (
        *("4 + 24", "1.7B", {"serve.devices": [0]}),
        r"needs 5\.0 GiB of card 0 .*, and 3\.6 GiB are there for it: set serve\.devices = \[1\]$",
        {"serve.devices": [1]},
    ),
    (
        *("4 + 24 + 24", "1.7B", {"serve.devices": [1], "train.devices": [0]}),
        r"training needs about 6\.5 GiB of card 0 .*, and 3\.1 GiB are there for it: set train\.devices = \[2\]$",
        {"train.devices": [2]},
    ),
    (
        *("1 x 8", "1.7B", {"serve.gpu_memory_utilization": 0.9}),  # no share holds a call
        r"server of serve needs 5\.0 GiB of card 0 .*, and 3\.7 GiB are there for it, beside training with 3\.9 GiB: "
        r"take a smaller base model, a card with 9\.7 GiB or more",
        None,
    ),
    (
        *("2 x 24", "0.5B", {"serve.devices": [2]}),
        r"serve\.devices names card 2, but there are cards 0 to 1",
        {"serve.devices": [1]},
    ),
    (
        *("1 x 24", "0.5B", {"train.devices": [1]}),
        r"train\.devices names card 1, but there is card 0 only",
        {"train.devices": [0]},
    ),
    (
        *("2 x 24", "0.5B", {"serve.tensor_parallel": 4}),
        r"serve\.tensor_parallel is 4, but 1 of 2 cards is free for it: set it to 2$",
        {"serve.tensor_parallel": 2},
    ),
    (
        *("none", "0.5B", {"serve.devices": [0]}),
        r"serve\.devices names card 0, but there is no",
        {"serve.devices": None},
    ),
    (
        *("2 x 24", "0.5B", {"train.learners": 3}),
        r"train\.learners is 3, but 1 of 2 cards is there for learners, and each takes one: set it to 2$",
        {"train.learners": 2},
    ),
    (
        *("1 x 24", "0.5B", {"train.learners": 2}),
        r"train\.learners is 2, but 1 of 1 card is there for learners, and each takes one: set it to 1$",
        {"train.learners": 1},
    ),
    (
        *("4 x 80", "0.5B", {"train.learners": 2, "train.devices": [1, 4]}),
        r"train\.devices names card 4, but there are cards 0 to 3",
        {"train.devices": [1, 3]},
    ),
    (
        *("4 x 80", "32B", {"train.learners": 3, "serve.max_model_len": 4096}),
        r"training needs about 82\.1 GiB of card 1 .*, and 72\.8 GiB are there for it",
        SAVING,
    ),
    (*("none", "0.5B", {"train.devices": [0]}), r"train\.devices names a card, but there", {"train.devices": None}),
]


@pytest.mark.parametrize(
    ("machine", "model", "options", "said", "fitting"),
    REFUSED,
    ids=[f"{row[1]} on {row[0]}{', ' if row[2] else ''}{', '.join(row[2])}" for row in REFUSED],
)
def test_what_does_not_fit_is_refused_with_a_setting_that_does(
    tmp_path: Path,
    machine: str,
    model: str,
    options: dict[str, Any],
    said: str,
    fitting: dict[str, Any] | None,
) -> None:
    with pytest.raises(ServingError, match=said) as refusal:
        place(machine_of(machine), write_model(tmp_path, model), options)
    assert "\n" not in str(refusal.value)
    if fitting is not None:
        place(machine_of(machine), write_model(tmp_path, model), {**options, **fitting})


def test_the_budget_that_the_trainer_is_told_to_take_does_fit(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="tokens_per_microbatch to") as refusal:
        place(machine_of("2 x 24"), write_model(tmp_path, "8B"))
    budget = re.search(r"tokens_per_microbatch to (\d+)", str(refusal.value))
    assert budget is not None
    options = {"train.trainer.system.tokens_per_microbatch": int(budget[1])}
    assert place(machine_of("2 x 24"), write_model(tmp_path, "8B"), options).plan.learners == (1,)


def test_rollouts_beside_updates_that_do_not_fit_are_told_to_take_turns(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"set train\.max_staleness = 0, so that the server sleeps"):
        place(machine_of("1 x 12"), write_model(tmp_path, "1.7B"), SIDE_BY_SIDE)
    place(machine_of("1 x 12"), write_model(tmp_path, "1.7B"))


@pytest.mark.parametrize(
    ("free_mib", "options"),
    [(150, {"serve.gpu_memory_utilization": 0.5}), (4268, {"serve.kv_cache_gib": 2.0, "serve.max_model_len": 16})],
)
def test_a_card_that_has_room_for_nothing_is_said_to_be_in_use(
    tmp_path: Path, free_mib: int, options: dict[str, Any]
) -> None:
    """A share or a cache of 0.0 is no setting that fits."""
    with pytest.raises(ServingError) as caught:
        place(machine_of("1 x 24", free_mib={0: free_mib}), write_model(tmp_path, "0.5B"), options)
    assert str(caught.value).endswith(
        ": the card is in use; end what else has its memory, or name another card (serve.devices)"
    )
