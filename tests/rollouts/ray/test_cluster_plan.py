"""Owns: the cluster plan of docs/cluster.md is what the formulas say, and the formulas start from what is measured.

- The page holds the table that the script computes; one column is worked out by hand here.
- The bytes that the plan takes for measured are those of a journal and a store that are written here.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.store_ingest import CALLS, number_to_trace
from support.paths import ROOT

from marft_bridge.rollouts.ray import cluster_plan as plan
from marft_bridge.rollouts.ray.cluster_plan import (
    Workload,
    gpus_of_one_store,
    llama_adapter,
    page_with_plan,
    workload_to_plan,
)
from trace_store.journal import Journal, line_of
from trace_store.store import TraceStore
from trainers.learners.calls import trajectories_to_values

PAGE = ROOT / "docs/cluster.md"


def test_the_page_holds_the_table_that_the_script_computes() -> None:
    page = PAGE.read_text()
    assert page_with_plan(page) == page
    assert page.count("| sampled tokens/s |") == 1
    assert f"about {gpus_of_one_store()} GPUs" in page


def test_the_page_quotes_the_measured_constants() -> None:
    page = PAGE.read_text()
    for line in (
        f"| journal, bytes | {plan.JOURNAL_BYTES_PER_ACTION:,.0f} | {plan.JOURNAL_BYTES_PER_TOKEN} per token |",
        f"| store, bytes | {plan.STORE_BYTES_PER_ACTION:.0f} | {plan.STORE_SHARE_OF_LISTS} of the lists ",
        f"| filing at the driver, µs | {plan.FILING_S_PER_ACTION * 1e6:.0f} | {plan.FILING_S_PER_TOKEN * 1e6:.3f} per",
        f"| taking in, µs | {plan.TAKE_IN_S_PER_ACTION * 1e6:.0f} | {plan.TAKE_IN_S_PER_TOKEN * 1e6:.2f} per token |",
    ):
        assert line in page


def test_a_hundred_gpus_by_hand() -> None:
    got = workload_to_plan(100, Workload())
    # 200,000 tokens/s in answers of 300 are 666.67 actions/s, in episodes of 4 calls 166.67 episodes/s.
    assert (got.sampled_per_s, got.prompt_per_s) == (200_000, pytest.approx(800_000))
    assert (got.actions_per_s, got.episodes_per_s) == (pytest.approx(666.67, abs=0.01), pytest.approx(166.67, abs=0.01))
    # 64 in flight share 2,000 tokens/s: 31.25 each, so 300 tokens take 9.6 s; 6,400 / (4 * 9.6 s) = 166.67 again.
    assert (got.call_s, got.in_flight) == (pytest.approx(9.6), 6_400)
    assert got.in_flight / (4 * got.call_s) == pytest.approx(got.episodes_per_s)
    # 1,513 + 15.6 * 1,500 = 24,913 bytes an action; of 1.25e9 bytes/s.
    assert got.journal_bytes_per_s == pytest.approx(16_608_667, rel=1e-6)
    assert got.network_share == pytest.approx(0.013287, rel=1e-3)
    # 230 + 0.41 * 1,500 = 845 µs and 27 + 0.042 * 1,500 = 90 µs an action.
    assert (got.take_in_cores, got.filing_cores) == (pytest.approx(0.56333, abs=1e-5), pytest.approx(0.06, abs=1e-6))
    assert got.stores == 1
    # Lists of 1,200 * 4 + 300 * 12 = 8,400 bytes; 680 + 0.98 * 8,400 = 8,912 bytes an action, 57.6 million a day.
    assert got.store_bytes_per_day == pytest.approx(513_331_200_000)
    # 13 machines read two adapters of 39,976,960 * 4 bytes.
    assert got.publish_bytes == 13 * 2 * 159_907_840
    assert got.publish_s == pytest.approx(3.326, abs=1e-3)
    # 790 + 19.8 * 1,500 = 30,490 bytes an action.
    assert got.learner_bytes_per_s == pytest.approx(20_326_667, rel=1e-6)


def test_the_adapter_of_the_plan_is_that_of_a_7b_llama() -> None:
    # 32 layers * 16 * (4 * 8,192 + 3 * 15,104) = 512 * 78,080.
    assert llama_adapter(16) == Workload().adapter_parameters == 512 * 78_080


def test_one_store_is_enough_up_to_the_number_that_the_page_names() -> None:
    gpus = gpus_of_one_store()
    assert (workload_to_plan(gpus, Workload()).stores, workload_to_plan(gpus + 1, Workload()).stores) == (1, 2)
    assert gpus_of_one_store(replace(Workload(), sampled_per_s=4_000)) == gpus // 2


@pytest.mark.parametrize("tokens", [32, 1_024])
def test_what_learners_are_told_of_a_call_is_as_long_as_planned(tmp_path: Path, tokens: int) -> None:
    chance, count = random.Random(1), 20
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        journal = Journal(store.journal_folder)
        for number in range(count):
            journal.append_all(number_to_trace(number, chance, tokens=tokens))
        journal.close()
        store.take_in()
        told = json.dumps(trajectories_to_values(store.trajectories()))
    planned = plan.LEARNER_BYTES_PER_ACTION + plan.LEARNER_BYTES_PER_TOKEN * 2 * tokens
    assert len(told) / (count * CALLS) == pytest.approx(planned, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [32, 1_024])
def test_the_bytes_of_the_plan_are_those_that_are_written(tmp_path: Path, tokens: int) -> None:
    chance, count = random.Random(1), 4_000 if tokens == 32 else 400
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        journal, written = Journal(store.journal_folder), 0
        for number in range(count):
            spans = number_to_trace(number, chance, tokens=tokens)
            written += sum(len(line_of(span)) for span in spans)
            journal.append_all(spans)
        journal.close()
        store.take_in()
    actions = count * CALLS
    planned = plan.JOURNAL_BYTES_PER_ACTION + plan.JOURNAL_BYTES_PER_TOKEN * 2 * tokens
    assert written / actions == pytest.approx(planned, rel=0.02)
    stored = plan.STORE_BYTES_PER_ACTION + plan.STORE_SHARE_OF_LISTS * 16 * tokens
    size = (tmp_path / "store.duckdb").stat().st_size
    assert size / actions == pytest.approx(stored, rel=0.15)  # a small file has some empty room
