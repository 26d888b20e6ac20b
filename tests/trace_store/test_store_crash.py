"""Owns: what was acknowledged is in the store, once and whole, however its writers ended.

- Collectors and intakes that are killed at random points lose no acknowledged episode, and leave no half one.
- A torn tail of any length costs its own line only. A full disk stops an intake in one line and costs nothing.
- Many collectors journal while one process takes in.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import TESTS
from support.sample_spans import START, chain

from trace_store.journal import Journal, line_of
from trace_store.records import Reward
from trace_store.store import TraceStore

PATHS = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\n"

# Arguments: journal folder, name of the collector, episodes. Each number that it prints is an acknowledged episode.
COLLECTOR = """
from pathlib import Path
from support.sample_spans import START, chain
from trace_store.journal import Journal
from trace_store.records import Reward
journal, name = Journal(Path(sys.argv[1])), sys.argv[2]
for number in range(int(sys.argv[3])):
    sample = chain(f"{name}f{number:06}", START + number)
    for record in (*sample.spans(), Reward(sample.trace_id, "reward", 0.5, "test", number)):
        journal.append(record)
    journal.sync()
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""

# Arguments: store. Each number that it prints is how many episodes one intake has added.
TAKER = """
from pathlib import Path
from trace_store import intake
from trace_store.store import TraceStore
intake.LINES_PER_TRANSACTION = 40
with TraceStore.open(Path(sys.argv[1])) as store:
    while True:
        sys.stdout.write(f"{store.take_in().episodes}\\n")
        sys.stdout.flush()
"""

FULL_DISK = """
import resource
from pathlib import Path
from trace_store.errors import StoreError
from trace_store.store import TraceStore
store = TraceStore.open(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    print(store.take_in().episodes)
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.close()
with TraceStore.open(Path(sys.argv[1])) as store:  # there is space again
    store.take_in()
    print(store.counts()["episodes"])
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PATHS + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def numbers_of(process: subprocess.Popen[str]) -> list[int]:
    """What a process printed until it ended; a last line without its end says nothing."""
    assert process.stdout is not None
    with process:
        return [int(line) for line in process.stdout.read().split("\n")[:-1]]


def episodes_in(store: TraceStore) -> set[tuple[str, int]]:
    """(collector, number) of every episode, after a look whether all of them are whole and none is there twice."""
    rows = store.sql(
        "SELECT e.episode_id, (SELECT count(*) FROM spans s WHERE s.trace_id = e.episode_id),"
        " (SELECT count(*) FROM actions a WHERE a.episode_id = e.episode_id),"
        " (SELECT count(*) FROM edges d WHERE d.episode_id = e.episode_id) FROM episodes e"
    )
    assert {row[1:] for row in rows} <= {(5, 2, 1)}
    keys = [row[0].lstrip("0").split("f") for row in rows]
    assert len({row[0] for row in rows}) == len(rows)
    return {(name, int(number)) for name, number in keys}


@pytest.mark.slow
def test_kills_at_random_points_lose_no_acknowledged_episode_and_leave_no_half_one(tmp_path: Path) -> None:
    rng, path, acknowledged = random.Random(11), tmp_path / "s.duckdb", set[tuple[str, int]]()
    journal = path.with_name(path.name + ".journal")
    for trial in range(1, 51):  # of two kills each
        with TraceStore.open(path) as store:
            episode_count = len(episodes_in(store))
        collector, taker = start(COLLECTOR, journal, trial, 10**6), start(TAKER, path)
        time.sleep(0.2 + 0.4 * rng.random())  # from the start of Python to hundreds of episodes later
        for process in rng.sample((collector, taker), 2):
            process.send_signal(signal.SIGKILL)
            time.sleep(rng.choice((0.0, 0.01)))
        numbers, taken_count = numbers_of(collector), sum(numbers_of(taker))
        acknowledged |= {(str(trial), number) for number in numbers}
        with TraceStore.open(path) as store:
            # What an intake acknowledged is there before anything is taken in again.
            assert len(episodes_in(store)) >= episode_count + taken_count
            store.take_in()
            recovered = episodes_in(store)
            rewarded = store.sql("SELECT count(*), count(DISTINCT episode_id) FROM rewards")
        assert acknowledged <= recovered
        assert len(recovered - acknowledged) <= trial  # each collector may have ended before it could say its last
        assert len(acknowledged) <= rewarded[0][0] == rewarded[0][1] <= len(recovered)
    assert len({name for name, _ in acknowledged}) >= 25  # the kills came in the middle of work
    assert list(journal.glob("*.segment")) == []


def test_a_torn_tail_costs_its_line_only_wherever_it_was_cut(tmp_path: Path) -> None:
    lines = [line_of(Reward(f"e{k}", "reward", 0.5, "test", k)) for k in range(2)]
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        store.journal_folder.mkdir()
        cuts = range(1, len(lines[1]))
        for cut in cuts:
            torn = line_of(Reward(f"cut{cut}", "reward", 0.5, "test", 0))
            (store.journal_folder / f"{cut}.segment").write_bytes(torn + lines[1][:cut])
        counts = store.take_in()
        assert (counts.rewards, counts.torn) == (len(cuts), len(cuts))
        assert store.sql("SELECT count(*) FROM rewards WHERE episode_id = 'e1'") == [(0,)]


# In the log of the first transaction, at its end, and when the log is written into the file.
@pytest.mark.slow
@pytest.mark.parametrize(("bytes_each", "limit"), [(2_000, 20_000), (2_000, 1_000_000), (60_000, 40_000_000)])
def test_a_full_disk_stops_an_intake_in_one_line_and_costs_nothing(tmp_path: Path, bytes_each: int, limit: int) -> None:
    path, chance = tmp_path / "s.duckdb", random.Random(3)
    journal = Journal(path.with_name(path.name + ".journal"))
    for k in range(600):
        tags = json.dumps({"long": chance.randbytes(bytes_each).hex()})
        journal.append_all(chain(f"1f{k:06}", START + k).spans(TAGS=tags))
    journal.close()
    TraceStore.open(path).close()
    script = tmp_path / "script.py"  # not as `-c`, which DuckDB takes for a person and shows its progress
    script.write_text(PATHS + FULL_DISK)
    command = [sys.executable, str(script), str(path), str(limit)]
    error_line, recovered = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert error_line.startswith(f"store {path}: ")
    assert error_line.endswith(
        "File too large; free space on its disk and run the command again: nothing that was acknowledged is lost"
    )
    assert recovered == "600"
    with TraceStore.open(path) as store:
        assert episodes_in(store) == {("1", k) for k in range(600)}


def test_many_collectors_journal_while_one_process_takes_in(tmp_path: Path) -> None:
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        collectors = [start(COLLECTOR, store.journal_folder, name, 40) for name in range(1, 9)]
        intakes = 0
        while any(collector.poll() is None for collector in collectors):
            store.take_in()
            intakes += 1
        assert [numbers_of(collector) for collector in collectors] == [list(range(40))] * 8
        store.take_in()
        assert episodes_in(store) == {(str(name), k) for name in range(1, 9) for k in range(40)}
        assert store.counts()["rewards"] == 8 * 40
        assert list(store.journal_folder.iterdir()) == []
    assert intakes > 8
