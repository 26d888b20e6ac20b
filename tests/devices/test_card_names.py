"""Owns: a card is told from another by its UUID, however CUDA_VISIBLE_DEVICES calls it."""

from __future__ import annotations

from functools import partial

import pytest

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.devices.card_names import names_to_uuids, rows_to_uuids, same_cards, visible_names
from marft_bridge.rollouts.ray import messages

ROWS = "0, GPU-aaaa1111-0000\n1, GPU-bbbb2222-0000\n2, GPU-bbbb3333-0000\n"


@pytest.mark.parametrize(
    ("names", "uuids"),
    [
        (["0"], {"GPU-aaaa1111-0000"}),
        (["GPU-aaaa"], {"GPU-aaaa1111-0000"}),  # CUDA takes the beginning of an id
        (["1", "GPU-bbbb2222-0000"], {"GPU-bbbb2222-0000"}),
        (["GPU-bbbb", "7", "MIG-4f2c"], {"GPU-bbbb", "7", "MIG-4f2c"}),  # two cards begin so; the others are not listed
    ],
)
def test_every_name_of_a_card_is_its_uuid(names: list[str], uuids: set[str]) -> None:
    assert rows_to_uuids(ROWS, names) == uuids


def test_without_a_driver_names_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert names_to_uuids(["0", "GPU-aaaa"]) == {"0", "GPU-aaaa"}
    assert names_to_uuids([]) == frozenset()
    assert rows_to_uuids("no row\n", ["0"]) == {"0"}


def test_the_environment_names_the_cards_that_are_visible() -> None:
    assert visible_names({"CUDA_VISIBLE_DEVICES": " 1, GPU-aaaa ,"}) == ["1", "GPU-aaaa"]
    assert visible_names({}) == []


def test_workers_on_a_cluster_are_told_the_command_s_cards_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {"app": "a:b", "nodes": ["n"], "tasks": "t.jsonl", "reward": "a:r"}
    config = BridgeConfig.model_validate({"graph": graph})
    monkeypatch.setattr(messages, "names_to_uuids", partial(rows_to_uuids, ROWS))
    assigned = messages.config_to_assign(config, {"base": "b" * 64}, ["2", "0"])(1)
    assert assigned.taken_cards == ("GPU-aaaa1111-0000", "GPU-bbbb3333-0000")


def test_a_number_is_no_card_of_another_machine() -> None:
    assert same_cards({"0", "GPU-a"}, {"0", "GPU-a", "GPU-b"}) == ["GPU-a"]
