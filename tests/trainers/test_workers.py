"""Owns: training in several processes: who takes which micro-batch, and what all of them get back.

- In two, three and four real processes, joined by accelerate over gloo: sums, maxima, gradients and ragged vectors are
  those of the whole, the same on all, also where some have nothing to do; what does not fit together is refused on all.
- One process alone computes what it would without any of this.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import workers_laws
from support.workers_rig import in_processes

from trainers.common.workers import Workers
from trainers.errors import TrainError

LAWS = (
    *("identity", "shares", "numbers", "gradients", "one_microbatch"),
    *("gathered", "gathered_from_one", "gathered_in_messages", "refusals"),
)


@pytest.fixture(
    scope="module",
    params=[2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4))],
    ids=lambda count: f"{count} processes",
)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What several processes said to every law, by rank."""
    found = in_processes(
        request.param, [f"support.workers_laws:{law}" for law in LAWS], tmp_path_factory.mktemp("several")
    )
    return {name.partition(":")[2]: results for name, results in found.items()}


def alike(results: list[Any]) -> Any:
    """The one result that all processes must have."""
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.slow
def test_every_process_knows_which_one_it_is_and_one_is_the_main_one(said: dict[str, list[Any]]) -> None:
    count = len(said["identity"])
    assert said["identity"] == [[rank, count, rank == 0, "cpu"] for rank in range(count)]


def test_batches_are_dealt_out_once_each_in_turn(said: dict[str, list[Any]]) -> None:
    """Of five batches and fewer; with four processes one batch leaves three of them without any."""
    dealt = {
        2: [["a", "c", "e"], ["b", "d"]],
        3: [["a", "d"], ["b", "e"], ["c"]],
        4: [["a", "e"], ["b"], ["c"], ["d"]],
    }[len(said["shares"])]
    for shares, all_five in zip(said["shares"], dealt, strict=True):
        for number, share in enumerate(shares):
            assert share == [batch for batch in all_five if batch < "abcdef"[number]]


def test_numbers_are_summed_in_float64(said: dict[str, list[Any]]) -> None:
    found = alike(said["numbers"])
    total = {2: 3, 3: 6, 4: 10}[len(said["numbers"])]  # 1 + 2 + ...
    assert found["add"] == [total, total * 2.0**53, pytest.approx(0.1 * len(said["numbers"]), rel=1e-15)]
    assert found["add_nothing"] == []
    assert found["max"] == [-1.0, -5.0]


def test_gradients_are_summed_and_a_missing_one_counts_as_zeros(said: dict[str, list[Any]]) -> None:
    found = alike(said["gradients"])
    # k + (k + 100) = 2 k + 100 for k = 0..5; + (k + 200) = 3 k + 300; + (k + 300) = 4 k + 600.
    assert (
        found["both"]
        == {
            2: [[100.0, 102.0, 104.0], [106.0, 108.0, 110.0]],
            3: [[300.0, 303.0, 306.0], [309.0, 312.0, 315.0]],
            4: [[600.0, 604.0, 608.0], [612.0, 616.0, 620.0]],
        }[len(said["gradients"])]
    )
    assert found["lone"] == [7.0, -8.0]
    assert found["none"] is None  # an optimiser would decay a parameter whose gradient is zero


def test_a_process_without_a_microbatch_gets_the_gradient_of_the_whole(said: dict[str, list[Any]]) -> None:
    assert alike(said["one_microbatch"]) == [3.0, 5.0]


def test_ragged_vectors_come_together_bit_for_bit(said: dict[str, list[Any]]) -> None:
    expected = [vector.tolist() for vector in workers_laws.vectors()]
    assert [len(vector) for vector in expected] == [3, 1, 0, 5, 2]
    assert alike(said["gathered"]) == expected
    assert alike(said["gathered_from_one"]) == expected
    assert alike(said["gathered_in_messages"]) == expected


def test_what_is_gathered_takes_the_room_of_one_message_where_messages_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("trainers.common.workers.MESSAGE_NUMBERS", 100)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda total, op: sizes.append(len(total)))  # others have none
    lengths = [40, 60, 0, 1, 250, 30, 99]
    vectors = [torch.full((length,), float(position)) for position, length in enumerate(lengths)]
    cpu = torch.device("cpu")
    together = Workers(0, 2, cpu).gather(list(enumerate(vectors)), lengths, cpu, kept_on=cpu)
    assert [vector.tolist() for vector in together] == [vector.tolist() for vector in vectors]
    held = (3, 1, 1, 1, 1)  # one number for each vector, whether it is there
    assert sizes == [of + numbers for of, numbers in zip(held, (100, 1, 250, 30, 99), strict=True)]


def test_what_does_not_fit_together_is_refused_on_every_process(said: dict[str, list[Any]]) -> None:
    twice, missing, same, other, longer = alike(said["refusals"])
    assert twice == missing == "over all processes a vector is missing or comes twice"
    assert same == "nothing"
    assert other == longer
    assert other.startswith("the processes differ in the round: start all with the same configuration")


def test_alone_nothing_is_copied_or_changed() -> None:
    alone = Workers.alone()
    assert (alone.rank, alone.count, alone.is_main) == (0, 1, True)
    assert alone.mine([1, 2, 3]) == [1, 2, 3]
    there, missing = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    there.grad = gradient = torch.ones(2)
    alone.add_gradients([there, missing])
    assert there.grad is gradient
    assert missing.grad is None
    assert alone.add_tensor(gradient) is gradient
    assert alone.add([0.1, 0.2]) == [0.1, 0.2]
    assert alone.max(-3.0) == -3.0
    vectors = workers_laws.vectors()
    parts = list(enumerate(vectors))[::-1]
    assert all(a is b for a, b in zip(alone.gather(parts, [3, 1, 0, 5, 2], there.device), vectors, strict=True))
    alone.check_same("the round", [1.0])
    alone.wait()
    alone.close()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, torch.ones(2))], "vector 1 is missing"),
        ([(0, torch.ones(2)), (0, torch.ones(2))], "vector 0 has shape .* or comes twice"),
        ([(0, torch.ones(3)), (1, torch.ones(1))], r"vector 0 has shape \(3,\)"),
    ],
    ids=["missing", "twice", "length"],
)
def test_vectors_that_are_not_those_announced_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workers.alone().gather(parts, [2, 1], torch.device("cpu"))


def test_a_process_without_a_group_does_not_take_itself_for_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE promises two processes; accelerate, without a rank for this one, joins none."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("accelerate.PartialState", lambda cpu: _Joined(1))
    with pytest.raises(TrainError, match="WORLD_SIZE is 2, but 1 could be joined"):
        Workers.of_accelerate("cpu")


class _Joined:
    """accelerate's state of a process that found no others."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes, self.process_index, self.device = num_processes, 0, torch.device("cpu")
