"""Owns: docs/gpus.md shows what the plan of the cards gives."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from support.card_rig import FOUR_BIT, FOUR_BIT_SERVER, SAVING, machine_of, place, pretend_cuda, write_model
from support.paths import ROOT

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import PlacedServeOptions
from marft_bridge.serving.vllm_arguments import server_argv, server_environment

PAGE = (ROOT / "docs/gpus.md").read_text()
TABLE = PAGE.partition("## What fits where")[2].partition("## ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| ")][1:]

OPTIONS = {"saving": SAVING, "4-bit": FOUR_BIT, "4-bit server": FOUR_BIT_SERVER}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1]} on {row[0]}")
def test_every_row_of_the_table_is_what_the_plan_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: list[str]
) -> None:
    pretend_cuda(monkeypatch)
    machine, model, *expected = row
    name, *words = model.split(", ")
    options = {key: value for word in words for key, value in OPTIONS[word].items()}
    try:
        plan = place(machine_of(machine), write_model(tmp_path, name), options).plan
    except ServingError:
        shown = ["refused", "", "", ""]
    else:
        (engine,) = plan.engines
        assert engine is not None
        cards = ", ".join(map(str, engine.devices))
        shown = [cards, f"{engine.utilization}", f"{engine.longest_call:,}", f"{plan.learners[0]}"]
    assert shown == expected


def test_the_table_has_rows_that_fit_and_rows_that_do_not() -> None:
    assert {row[2] == "refused" for row in ROWS} == {True, False}


def test_the_lines_that_are_shown_are_the_plans_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    for line in place(machine_of("1 x 16"), write_model(tmp_path, "1.7B")).lines():
        assert line.replace("(GPU,", "(NVIDIA RTX A4000,") in PAGE
    with pytest.raises(ServingError) as refusal:
        place(machine_of("2 x 24"), write_model(tmp_path, "8B"), SAVING | {"serve.max_model_len": 65536})
    assert str(refusal.value).replace("(GPU,", "(NVIDIA L4,") in PAGE


def test_a_server_of_ones_own_is_started_as_we_start_it() -> None:
    options = PlacedServeOptions(tensor_parallel=4, max_lora_rank=8)
    words = server_argv(options, Path("models/large"), 8000, cpu=False)
    shown = PAGE.partition("vllm serve models/large ")[2].partition("```")[0].split()
    for flag, value in pairwise(shown):
        if flag.startswith("--"):
            assert flag in words
            assert value.startswith("--") or words[words.index(flag) + 1] == value
    assert server_environment("key", cpu=False)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
