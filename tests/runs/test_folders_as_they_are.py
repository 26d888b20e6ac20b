"""Owns: run folders as they are met with links, FIFOs and doors for others in them.

- Nothing is written through a link, symbolic or hard; FIFOs and devices are refused without waiting for them.
- A folder in which others may write is refused; what is not ours in it, and a link to the folder itself, is not.
- `name` in bridge.toml is one folder name, so no run leaves runs/.
- Every place where the source writes a file is in a table, with what keeps it in its folder.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.floors import PACKAGES
from support.paths import ROOT
from support.sample_report import bare_report
from support.sample_spans import chain

from marft_bridge.cli import run
from marft_bridge.common.errors import BridgeError, StoreError
from marft_bridge.common.files import write_atomically
from marft_bridge.comparison.page import write_report
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.serve import ServeOptions
from marft_bridge.ingest.trace_spool import TraceSpool
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.vllm_process import ServerProcess
from marft_bridge.training.loggers.tensorboard import write_scalars
from trace_store.files import create_file, make_folder, open_to_read, open_to_write
from trace_store.journal import Journal
from trace_store.store import TraceStore
from trainers.common.files import whole_folder
from trainers.errors import TrainError

PRECIOUS = "years of work"


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Whatever waits for a FIFO's other end fails instead."""

    def fail(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside that nobody may change."""
    path = tmp_path / "precious"
    path.write_text(PRECIOUS)
    path.chmod(0o644)
    return path


def assert_untouched(path: Path) -> None:
    assert path.read_text() == PRECIOUS
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def take_lock(path: Path) -> None:
    with RunFolder(path.parent).lock_for("collect"):
        pass


def write_in_place(path: Path) -> None:
    os.close(open_to_write(path, append=True))


def open_log(path: Path) -> None:
    ServerProcess(ServeOptions(), path.parent, path)


def register_adapter(path: Path) -> None:
    AdapterRegistry(path.parents[2], "b" * 64).register("a", 1, None, {})


WRITERS_IN_PLACE: dict[str, Callable[[Path], object]] = {
    "lock": take_lock,
    "vllm.log": open_log,
    "metrics.jsonl": write_in_place,
    "store.duckdb": TraceStore.open,
    "store.duckdb.spool/receiver.lock": lambda path: TraceSpool(path.parent, 0.0),
    "adapters/a/1/adapter_model.safetensors": register_adapter,
}


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", WRITERS_IN_PLACE)
def test_nothing_is_written_through_a_link_of_either_kind(
    folder: RunFolder, precious: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    path = folder.path / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    link(precious, path)
    with pytest.raises((StoreError, BridgeError), match=re.escape(path.name)) as refused:
        WRITERS_IN_PLACE[name](path)
    assert "\n" not in str(refused.value)
    assert_untouched(precious)


@pytest.mark.parametrize("name", WRITERS_IN_PLACE)
def test_a_fifo_is_refused_without_waiting_for_its_other_end(folder: RunFolder, name: str) -> None:
    path = folder.path / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.mkfifo(path)
    with at_most(20), pytest.raises((StoreError, BridgeError), match=r"FIFO|no adapter_model|has no"):
        WRITERS_IN_PLACE[name](path)


def test_a_link_of_a_file_that_is_replaced_is_replaced_itself(folder: RunFolder, precious: Path) -> None:
    (folder.path / "best.json").symlink_to(precious)
    write_atomically(folder.path / "best.json", "new")
    assert not (folder.path / "best.json").is_symlink()
    assert_untouched(precious)


WRITERS_INTO_FOLDERS: dict[str, Callable[[Path], object]] = {
    "store.duckdb.journal": lambda path: Journal(path).append(chain("a").spans()[0]),
    "store.duckdb.spool": lambda path: TraceSpool(path, 0.0),
    "adapters": lambda path: AdapterRegistry(path, "b" * 64).new_folder("a", 1),
    "adapters/a": lambda path: AdapterRegistry(path.parent, "b" * 64).new_folder("a", 1),
    "adapters/a/1": lambda path: AdapterRegistry(path.parents[1], "b" * 64).new_folder("a", 1),
    "checkpoint": lambda path: whole_folder(path).__enter__(),
    "tensorboard": lambda path: write_scalars(path, {"loss": 1.0}, 1),
    "promoted": make_folder,
    "judge": make_folder,
    "advantages": make_folder,
}


@pytest.mark.parametrize("name", WRITERS_INTO_FOLDERS)
def test_nothing_is_written_into_a_linked_folder(folder: RunFolder, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = folder.path / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.symlink_to(elsewhere)
    with pytest.raises((StoreError, TrainError), match="is a link"):
        WRITERS_INTO_FOLDERS[name](path)
    assert list(elsewhere.iterdir()) == []
    with pytest.raises(StoreError, match="is a link"), folder.lock_for("train"):
        pass


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("make", [make_fifo, make_link])
@pytest.mark.parametrize(
    "name", ["report.json", "metrics.jsonl", "server.json", "best.json", "adapters/a/1/marft.json"]
)
def test_commands_that_only_read_refuse_such_a_folder_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, make: Callable[[Path], None]
) -> None:
    run_folder = tmp_path / "run"
    path = run_folder / name
    path.parent.mkdir(mode=0o700, parents=True)
    make(path)
    config = ROOT / "examples/math_duo/bridge.toml"
    with at_most(60):
        assert run(["status", "--config", str(config), "--run", str(run_folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert str(path) in captured.err


def test_a_segment_that_is_a_fifo_stops_commands_with_its_name_and_an_intake_passes_it_over(folder: RunFolder) -> None:
    folder.journal.mkdir(mode=0o700)
    os.mkfifo(folder.journal / "1-a.segment")
    with at_most(60), TraceStore.open(folder.store) as store:
        assert store.take_in().odd == 1
    with pytest.raises(StoreError, match=r"1-a\.segment is a FIFO"):
        folder.refuse_unsafe()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o707])
def test_a_folder_in_which_others_may_write_is_refused(folder: RunFolder, mode: int) -> None:
    for path in (folder.path, folder.path / "adapters", folder.path / "adapters" / "a"):
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(mode)
        with pytest.raises(StoreError, match=rf"others may write {re.escape(str(path))}: d.*`chmod -R go-w "):
            folder.create()
        path.chmod(0o755)
        folder.create()


def test_a_file_that_others_may_write_is_refused(folder: RunFolder) -> None:
    folder.metrics.write_text("")
    folder.metrics.chmod(0o666)
    with pytest.raises(StoreError, match="others may write"):
        folder.create()


def test_what_is_not_ours_and_how_the_folder_is_reached_is_the_users_business(
    folder: RunFolder, tmp_path: Path
) -> None:
    (folder.path / "notes").symlink_to("/etc")
    (folder.path / "data").mkdir(mode=0o777)
    (tmp_path / "by-link").symlink_to(folder.path)
    with RunFolder(tmp_path / "by-link").lock_for("collect"):
        pass


def test_two_names_in_one_folder_are_what_a_killed_promotion_leaves(folder: RunFolder, tmp_path: Path) -> None:
    (folder.path / "promoted").mkdir(mode=0o700)
    manifest = folder.path / "promoted" / "1.json"
    manifest.write_text("{}")
    os.link(manifest, folder.path / "promoted" / ".1.json.abc")
    folder.refuse_unsafe()
    os.link(manifest, tmp_path / "outside")
    with pytest.raises(StoreError, match="has a second name elsewhere"):
        folder.refuse_unsafe()


def test_new_files_are_private_and_never_take_a_taken_name(tmp_path: Path, precious: Path) -> None:
    old_mask = os.umask(0)
    try:
        for handle in (create_file(tmp_path / "a"), open_to_write(tmp_path / "b")):
            assert stat.S_IMODE(os.fstat(handle).st_mode) == 0o600
            os.close(handle)
        make_folder(tmp_path / "c")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    (tmp_path / "d").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "a", tmp_path / "d", precious):
        with pytest.raises(FileExistsError):
            create_file(path)
    with pytest.raises(StoreError, match="is a device"):
        open_to_read(Path("/dev/null"))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["../../../x", "a/b", "/etc/x", "..", ".", "", "a\\nb", "x\\u0000", "é" * 128])
def test_a_name_that_leaves_runs_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bridge.toml"
    text = (ROOT / "examples/math_duo/bridge.toml").read_text()
    path.write_text(text.replace('name = "math_duo"', f'name = "{name}"', 1))
    with pytest.raises(BridgeError, match=r"name: .* is no folder name under runs/|a NUL character") as refused:
        toml_to_config(path)
    assert "\n" not in str(refused.value)


def test_a_report_is_complete_wherever_writing_it_was_killed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """report.json is the last: `erase` takes it for the sign that the other two forms are done."""
    order: list[str] = []
    monkeypatch.setattr("marft_bridge.comparison.page.write_atomically", lambda path, _: order.append(path.name))
    write_report(bare_report(), folder.path)
    assert order[-1] == "report.json"
    assert sorted(order) == ["report.html", "report.json", "report.md"]


# -- every writer ---------------------------------------------------------------------------------------------

# What makes or changes a file or a folder, by the last name of the function. DuckDB makes files within `private_files`.
WRITING_CALLS = frozenset(
    re.findall(
        r"\w+",
        """
        write_text write_bytes touch mkdir makedirs symlink_to hardlink_to rename mkstemp mkdtemp TemporaryDirectory
        NamedTemporaryFile TemporaryFile copyfile copy2 copytree rmtree symlink truncate pwrite ftruncate save_file
        save_pretrained chmod fchmod mkfifo create_file open_to_write make_folder make_folder_unsynced locked_file
        write_atomically held_file replacing
        whole_folder changing private_files
        """,
    )
)

ATOMIC = "write_atomically, held_file or replacing: a new file takes the name, which replaces a link itself"
IN_PLACE = "open_to_write or locked_file: no link, no second name, no FIFO; folders by make_folder, which takes no link"
NEW = "a new name in a folder of ours (make_folder), refused where it is taken"
INSIDE = "into a folder that was just made, by whole_folder or new_folder"
CHECKED = "DuckDB's own files: their path is checked before it is opened (check_before_opening)"
SAFE = "what the others use"
OUTSIDE = "no run folder: a path that the user named, or the system's folder for temporary files"

WRITERS = {
    "marft_bridge/commands/init.py": ("write_atomically", OUTSIDE),
    "marft_bridge/commands/probe.py": ("TemporaryDirectory", OUTSIDE),
    "marft_bridge/common/files.py": ("mkstemp open*2 replace replacing*2", SAFE),
    "marft_bridge/comparison/page.py": ("make_folder write_atomically", ATOMIC),
    "marft_bridge/distillation/command.py": ("rmtree*2", INSIDE),
    "marft_bridge/distillation/team_adapters.py": ("copyfile", INSIDE),
    "marft_bridge/erasure/command.py": ("locked_file", IN_PLACE),
    "marft_bridge/commands/propose_rubric.py": ("open", OUTSIDE),
    "marft_bridge/ingest/trace_spool.py": ("make_folder open_to_write", IN_PLACE),
    "marft_bridge/ingest/writer.py": ("mkdir", OUTSIDE),
    "marft_bridge/live/split.py": ("held_file write_atomically", ATOMIC),
    "marft_bridge/promotion/candidate_check.py": ("make_folder write_atomically", ATOMIC),
    "marft_bridge/promotion/manifest.py": ("link make_folder mkstemp open write_atomically", NEW),
    "marft_bridge/rewards/judge.py": ("make_folder write_atomically", ATOMIC),
    "marft_bridge/rewards/ranking.py": ("make_folder write_atomically", ATOMIC),
    "marft_bridge/rollouts/held_out.py": ("write_atomically*2", ATOMIC),
    "marft_bridge/rollouts/ray/connection.py": ("rmtree", OUTSIDE),
    "marft_bridge/rollouts/ray/worker.py": ("mkdtemp rmtree", OUTSIDE),
    "marft_bridge/runs/device_lines.py": ("held_file", ATOMIC),
    "marft_bridge/runs/named_version.py": ("write_atomically", ATOMIC),
    "marft_bridge/runs/run_folder.py": ("locked_file make_folder pwrite truncate write_atomically*2", IN_PLACE),
    "marft_bridge/sandbox/confine.py": ("mkdir*3 open symlink_to touch write_text*2", OUTSIDE),
    "marft_bridge/sandbox/programs.py": ("NamedTemporaryFile chmod mkdtemp", OUTSIDE),
    "marft_bridge/sandbox/worker_main.py": ("open*2", OUTSIDE),
    "marft_bridge/replay/replayed_run.py": ("TemporaryDirectory", OUTSIDE),
    "marft_bridge/serving/adapter_registry.py": (
        "fchmod make_folder*4 open open_to_write*2 rmtree*2 write_atomically",
        IN_PLACE,
    ),
    "marft_bridge/serving/prepare_model.py": ("TemporaryDirectory chmod*2 mkdir rename save_pretrained*2", OUTSIDE),
    "marft_bridge/serving/server_file.py": ("held_file", ATOMIC),
    "marft_bridge/serving/vllm_process.py": ("make_folder open_to_write*2 truncate", IN_PLACE),
    "marft_bridge/serving/zero_adapter.py": ("save_file write_text", INSIDE),
    "marft_bridge/traces/copies.py": ("write_atomically", ATOMIC),
    "marft_bridge/traces/exports.py": ("mkdir", OUTSIDE),
    "marft_bridge/training/advantage_log.py": ("make_folder replacing", ATOMIC),
    "marft_bridge/training/loggers/run_loggers.py": ("make_folder*2 write_atomically", ATOMIC),
    "marft_bridge/training/loggers/tensorboard.py": ("create_file make_folder open", NEW),
    "marft_bridge/training/planned_forks.py": ("make_folder write_atomically", ATOMIC),
    "marft_bridge/training/child_learners.py": ("mkdtemp open_to_write rmtree touch truncate", IN_PLACE),
    "marft_bridge/training/train.py": ("open open_to_write", IN_PLACE),
    "trace_store/compaction.py": ("open private_files*2 replace rmtree", CHECKED),
    "trace_store/connection.py": ("private_files", CHECKED),
    "trace_store/ducklake.py": ("private_files", OUTSIDE),
    "trace_store/erasure.py": ("changing ftruncate open_to_write private_files", IN_PLACE),
    "trace_store/files.py": ("make_folder_unsynced mkdir*2 open open_to_write", SAFE),
    "trace_store/journal.py": ("create_file*2 ftruncate make_folder_unsynced open pwrite*3 rename*2 replace", NEW),
    "trace_store/manifest.py": ("create_file make_folder open replace", OUTSIDE),
    "trace_store/parquet.py": ("changing mkdir*2 private_files rename", OUTSIDE),
    "trace_store/store.py": ("private_files*6", CHECKED),
    "trace_store/unread.py": ("mkdtemp private_files rmtree*2 write_bytes", OUTSIDE),
    "trainers/adapters/adapter_files.py": ("open save_file whole_folder write_text", INSIDE),
    "trainers/checkpoint.py": ("save_file whole_folder write_text", INSIDE),
    "trainers/common/files.py": ("chmod mkdir mkdtemp rename*4 rmtree*4", SAFE),
    "trainers/export.py": ("copyfile*2 save_file whole_folder*2 write_text*3", OUTSIDE),
}


def writing_call(call: ast.Call) -> str | None:
    """The name under which a call counts as writing; None for one that does not write."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in ("open", "fdopen"):
        modes = [value.value for value in arguments if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        writes = any(re.fullmatch("[rwaxbt+]{1,3}", mode) and set(mode) & set("wax+") for mode in modes)
        flags = {node.attr for value in arguments for node in ast.walk(value) if isinstance(node, ast.Attribute)}
        return "open" if writes or flags & {"O_CREAT", "O_RDWR", "O_WRONLY"} else None
    if name == "replace":  # a text's has two arguments, a dataclass's has names
        return name if len(call.args) == 1 and not call.keywords else None
    if name in ("copy", "move", "link"):
        return name if len(call.args) == 2 else None
    return name if name in WRITING_CALLS else None


def source_to_calls(source: str) -> str:
    """A module's writing calls: each name once, with its number where that is not 1."""
    names = [
        name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and (name := writing_call(node))
    ]
    return " ".join(name if count == 1 else f"{name}*{count}" for name, count in sorted(Counter(names).items()))


def test_every_writer_is_in_the_table_with_what_keeps_it_in_its_folder() -> None:
    calls = {
        str(path.relative_to(ROOT)): source_to_calls(path.read_text())
        for package in PACKAGES
        if package != "graphs"
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    assert {path: text for path, text in calls.items() if text} == {path: text for path, (text, _) in WRITERS.items()}


def test_the_table_sees_every_kind_of_writing() -> None:
    assert source_to_calls("Path(p).open('w'); open(p, mode='ab'); os.open(p, os.O_CREAT)") == "open*3"
    assert source_to_calls("open(p); p.open('rb'); 'a'.replace('b', 'c'); replace(x, y=1)") == ""
    assert (
        source_to_calls("p.replace(q); shutil.copy(p, q); os.link(p, q); p.write_text('x')")
        == "copy link replace write_text"
    )
