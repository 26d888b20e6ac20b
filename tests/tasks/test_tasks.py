r"""Owns: `graph.tasks` in every layout gives tasks, or one line that says what is wrong and where.

- JSON lines, Parquet and iterables give the same tasks; the layouts of MATH, GSM8K and HumanEval become fields that
  the rewards `math`, `numeric` and `code` read.
- Files are read line by line within a bound; ids are unique; a field that a reader makes is never overwritten.
- What the configuration cannot mean is refused by name.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.tasks import lines, reading
from marft_bridge.tasks.gsm8k import solution_to_number
from marft_bridge.tasks.math_problems import solution_to_answer
from marft_bridge.tasks.options import (
    AnySource,
    Gsm8kTasks,
    HumanEvalTasks,
    JsonlTasks,
    MathTasks,
    ParquetTasks,
    text_to_tasks,
)
from marft_bridge.tasks.reading import read_tasks

SEPARATORS = "a\u2028b\x85c"  # ends of a line to Python's splitlines, not to JSON
ITEMS: list[dict[str, Any]] = [{"id": 7, "q": SEPARATORS, "n": [1, {"x": None}]}, {"id": "b", "q": "ü", "n": [2]}]
TASKS = [{"id": "7", "q": SEPARATORS, "n": [1, {"x": None}]}, {"id": "b", "q": "ü", "n": [2]}]


def one_by_one() -> Iterator[dict[str, Any]]:
    yield from ITEMS


def write_lines(path: Path, records: list[Any]) -> Path:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def refusal(tasks: str | AnySource, fields: tuple[str, ...] = ()) -> str:
    with pytest.raises(GraphError) as caught:
        read_tasks(tasks, fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.jsonl.gz"])
def test_json_lines_are_tasks_plain_and_compressed(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, ITEMS)
    assert read_tasks(str(path), ("q",)) == TASKS
    assert read_tasks(JsonlTasks(path=str(path)), ("q",)) == TASKS
    assert read_tasks(JsonlTasks(path=str(path), limit=1), ()) == TASKS[:1]


@pytest.mark.parametrize("name", ["ITEMS", "one_by_one"])
def test_an_iterable_and_a_generator_give_the_same_tasks(name: str) -> None:
    assert read_tasks(f"{Path(__file__)}:{name}", ("q",)) == TASKS


def test_a_parquet_file_gives_its_rows_in_order_with_values_that_json_has(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    duckdb.sql(
        "SELECT i AS id, 'question ' || i AS t, (i / 4)::DECIMAL(6, 2) AS price, DATE '2026-01-02' + i::INT AS day, "
        "CASE WHEN i % 2 = 0 THEN i END AS even, [i, i + 1] AS two, {'a': i} AS inner FROM range(1000) r(i)"
    ).write_parquet(str(path))
    tasks = read_tasks(str(path), ("t",))
    assert [task["id"] for task in tasks] == [str(i) for i in range(1000)]
    assert tasks[5] == {
        "id": "5",
        "t": "question 5",
        "price": 1.25,
        "day": "2026-01-07",
        "even": None,
        "two": [5, 6],
        "inner": {"a": 5},
    }
    assert "has an 'id' besides 't'" in refusal(ParquetTasks(path=str(path), id_from="t"))


def test_a_column_of_another_name_can_be_the_id(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    duckdb.sql("SELECT 'x' || i AS uid FROM range(3) r(i)").write_parquet(str(path))
    assert read_tasks(ParquetTasks(path=str(path), id_from="uid", limit=2), ()) == [
        {"uid": "x0", "id": "x0"},
        {"uid": "x1", "id": "x1"},
    ]
    assert "lacks 'id', the field of id_from; it has: uid" in refusal(ParquetTasks(path=str(path)))


MATH = {"problem": "Halve one.", "level": "Level 2", "type": "Algebra", "solution": r"So \boxed{\frac{1}{2}}."}


def test_math_is_read_from_a_folder_in_the_order_of_its_numbers_and_from_lines(tmp_path: Path) -> None:
    records = {"algebra/10": MATH, "algebra/2": MATH | {"level": "Level 5"}, "geometry/1": MATH | {"level": "Level ?"}}
    for name, record in records.items():
        file = tmp_path / "train" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record))
    (tmp_path / "train" / "README.md").write_text("not a problem")
    tasks = read_tasks(MathTasks(path=str(tmp_path / "train")), ("problem", "answer"))
    assert [task["id"] for task in tasks] == ["algebra/2", "algebra/10", "geometry/1"]
    assert tasks[1] == MATH | {"id": "algebra/10", "answer": r"\frac{1}{2}"}
    chosen = read_tasks(MathTasks(path=str(tmp_path / "train"), levels=(1, 2)), ())
    assert [task["id"] for task in chosen] == ["algebra/10"]

    lines_ = write_lines(tmp_path / "test.jsonl", [MATH, MATH | {"unique_id": "t/5", "answer": "0.5", "level": 3}])
    first, second = read_tasks(MathTasks(path=str(lines_)), ())
    assert (first["id"], first["answer"]) == ("test-1", r"\frac{1}{2}")
    assert (second["id"], second["answer"]) == ("t/5", "0.5")
    assert [task["id"] for task in read_tasks(MathTasks(path=str(lines_), levels=(3,)), ())] == ["t/5"]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{x^{2}}", "x^{2}"),
        (r"it is $\boxed 5$", "5"),
        (r"it is \boxed 7.", "7"),
        (r"\boxed { 3 }", "3"),
        (r"\boxed{never closed", None),
        (r"\boxed{}", None),
        ("nothing", None),
    ],
)
def test_the_answer_of_math_is_what_the_last_box_holds(solution: str, answer: str | None) -> None:
    assert solution_to_answer(solution) == answer


def test_a_record_of_math_keeps_an_id_of_its_own(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "test.jsonl", [MATH | {"unique_id": "t/5", "id": "mine"}])
    (task,) = read_tasks(MathTasks(path=str(path)), ())
    assert (task["id"], task["unique_id"]) == ("mine", "t/5")


def test_gsm8k_keeps_the_solution_and_makes_the_number_the_answer(tmp_path: Path) -> None:
    record = {"question": "3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
    path = write_lines(tmp_path / "train.jsonl", [record, record | {"id": "mine", "source": "x"}])
    assert read_tasks(Gsm8kTasks(path=str(path)), ("question", "answer")) == [
        {"id": "train-1", "question": "3 + 4?", "answer": "7", "solution": record["answer"]},
        {"id": "mine", "question": "3 + 4?", "answer": "7", "solution": record["answer"], "source": "x"},
    ]


@pytest.mark.parametrize(
    ("solution", "number"),
    [
        *(("#### 42", "42"), ("a\n####42.5", "42.5"), ("#### -3", "-3"), ("#### $1,234,567.", "1234567")),
        *(("#### 1 #### 2", "2"), ("#### seven", None), ("42", None), ("####", None), ("#### 1 2", None)),
        *(("#### 3,5", None), ("#### 12,34", None), ("#### 1,234.5", "1234.5"), ("#### -.5", "-.5")),
    ],
)
def test_the_number_of_gsm8k_is_a_plain_one(solution: str, number: str | None) -> None:
    assert solution_to_number(solution) == number


PROGRAM = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\ndef half(x: float) -> float:\n    return x / 2\n\n"
    'def halves(xs: List[float]) -> List[float]:\n    """Halves all."""\n',
    "entry_point": "halves",
    "canonical_solution": "    return [half(x) for x in xs]\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([2, 4]) == [1, 2]\n",
}


@pytest.mark.parametrize("name", ["HumanEval.jsonl", "HumanEval.jsonl.gz"])
def test_humaneval_has_what_stands_before_the_function_as_its_setup(tmp_path: Path, name: str) -> None:
    (task,) = read_tasks(HumanEvalTasks(path=str(write_lines(tmp_path / name, [PROGRAM]))), ("test",))
    setup = "from typing import List\n\ndef half(x: float) -> float:\n    return x / 2\n\n"
    assert task == PROGRAM | {"id": "HumanEval/0", "setup": setup}


@pytest.mark.parametrize(
    ("source", "record", "message"),
    [
        (Gsm8kTasks, {"question": "?"}, "line 1 of '{}' lacks 'answer', which GSM8K's layout has; it has: question"),
        (Gsm8kTasks, {"question": "?", "answer": 7}, "'answer' in line 1 of '{}' is a int, not a text"),
        (Gsm8kTasks, {"question": "?", "answer": "7"}, "'answer' in line 1 of '{}' has no number after ####; end it"),
        (
            *(Gsm8kTasks, {"question": "?", "answer": "#### 7", "solution": "mine"}),
            "line 1 of '{}' has a field 'solution', which this reader makes itself; rename it",
        ),
        (MathTasks, {"problem": "?", "solution": "7"}, "the solution in line 1 of '{}' boxes nothing; put its answer"),
        (MathTasks, {"solution": r"\boxed{7}"}, "line 1 of '{}' lacks 'problem', which MATH's layout has"),
        (HumanEvalTasks, PROGRAM | {"id": "x"}, "line 1 of '{}' has a field 'id', which this reader makes itself"),
        (HumanEvalTasks, PROGRAM | {"entry_point": "f()"}, "'entry_point' in line 1 of '{}' is no name of a function"),
        (HumanEvalTasks, PROGRAM | {"entry_point": "h"}, "'prompt' in line 1 of '{}' does not begin the function 'h'"),
        (HumanEvalTasks, PROGRAM | {"test": "assert 1"}, "'test' in line 1 of '{}' defines no function check(candid"),
        (JsonlTasks, {"id": None}, "the id of line 1 of '{}' is a NoneType, not a text or a number"),
        (JsonlTasks, {"id": True}, "the id of line 1 of '{}' is a bool, not a text or a number"),
        (JsonlTasks, {"id": 1, "x": float("nan")}, "line 1 of '{}' is not JSON: NaN is no JSON value"),
    ],
)
def test_a_record_of_another_layout_is_named_by_its_line(
    tmp_path: Path, source: type[Any], record: dict[str, Any], message: str
) -> None:
    path = write_lines(tmp_path / "t.jsonl", [record])
    assert message.replace("{}", str(path)) in refusal(source(path=str(path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"id": 1}\n\xff\xfe\n', "line 2 of '{}' is not JSON: 'utf-8' codec"),
        ("t.jsonl", b"[" * 100_000 + b"\n", "line 1 of '{}' is not JSON"),
        ("t.jsonl.gz", b"not gzip", "cannot read '{}': Not a gzipped file"),
        ("t.jsonl.gz", gzip.compress(b'{"id": 1}\n', mtime=0)[:-9], "cannot read '{}': Compressed file ended before"),
        ("t.parquet", b"PAR1 no", "cannot read '{}': "),
        ("t[1].parquet", b"PAR1", "'{}' holds one of * ? [; rename the file"),
    ],
    ids=["bytes", "nested", "no gzip", "half of a gzip", "no parquet", "a pattern"],
)
def test_a_file_that_is_something_else_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert message.replace("{}", str(path)) in refusal(str(path))


def test_a_missing_file_and_a_folder_without_problems_are_named(tmp_path: Path) -> None:
    assert "cannot read 'none.jsonl': [Errno 2]" in refusal(Gsm8kTasks(path="none.jsonl"))
    assert "there is no file 'none.parquet'" in refusal("none.parquet")
    assert f"the folder {str(tmp_path)!r} holds no .json file, at any depth" in refusal(MathTasks(path=str(tmp_path)))


def test_a_line_and_a_set_of_tasks_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "x": "' + b"a" * 200 + b'"}\n'))
    monkeypatch.setattr(lines, "MAX_LINE", 100)
    assert "is longer than" in refusal(str(path))
    write_lines(tmp_path / "many.jsonl", [{"id": n} for n in range(9)])
    monkeypatch.setattr(reading, "MAX_TASKS", 8)
    assert "holds more than 8 tasks; give a part of them" in refusal(str(tmp_path / "many.jsonl"))
    assert len(read_tasks(JsonlTasks(path=str(tmp_path / "many.jsonl"), limit=8), ())) == 8


def test_ids_are_unique_whatever_their_type(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{"id": 1}, {"id": "1"}])
    assert f"task 2 of {str(path)!r} repeats the id '1'" in refusal(str(path))


HEAD = '[graph]\napp = "a:b"\nnodes = ["n"]\nreward = "a:r"\n'


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{ kind = "gsm8k", pth = "x" }', "unknown key 'graph.tasks.gsm8k.pth'; did you mean 'path'? (and 1 more)"),
        ('{ kind = "gsm8k" }', "the key 'graph.tasks.gsm8k.path' is missing"),
        ('{ kind = "gsm8" }', "graph.tasks: a name, or a table whose kind is one of jsonl, parquet, math, gsm8k"),
        ("3", "graph.tasks: a name, or a table whose kind is one of"),
        ('{ kind = "gsm8k", path = "x", levels = [1] }', "unknown key 'graph.tasks.gsm8k.levels'"),
        ('{ kind = "reasoning_gym", dataset = "x", limit = 3 }', "unknown key 'graph.tasks.reasoning_gym.limit'"),
        ('{ kind = "math", path = "x", levels = [7] }', "graph.tasks.math.levels.0: Input should be less than or"),
        ('{ kind = "math", path = "x", levels = [2, 2] }', "graph.tasks.math.levels: 2 is there twice"),
        ('{ kind = "math", path = "x", levels = [-1] }', "graph.tasks.math.levels.0: Input should be greater than or"),
        ('{ kind = "jsonl", path = "x", limit = 0 }', "graph.tasks.jsonl.limit: Input should be greater than or equal"),
    ],
)
def test_what_the_table_cannot_mean_is_refused_by_name(tmp_path: Path, written: str, message: str) -> None:
    (tmp_path / "bridge.toml").write_text(f"{HEAD}tasks = {written}\n")
    with pytest.raises(ConfigError) as caught:
        toml_to_config(tmp_path / "bridge.toml")
    assert message in str(caught.value)


def test_a_flag_says_a_name_or_a_kind_and_where() -> None:
    assert text_to_tasks("my_app.py:tasks") == "my_app.py:tasks"
    assert text_to_tasks("gsm8k:data/train.jsonl") == Gsm8kTasks(path="data/train.jsonl")
    assert text_to_tasks("math:") == "math:"
    assert text_to_tasks("reasoning_gym:chain_sum").model_dump(exclude_defaults=True) == {"dataset": "chain_sum"}  # type: ignore[union-attr]


def test_a_whole_file_of_json_is_not_a_task_a_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(ITEMS, indent=1))
    assert "line 1 of" in refusal(str(tmp_path / "t.jsonl"))


@pytest.mark.parametrize("name", ["mixes", "needs", "opens", "breaks", "opens_late"])
def test_a_function_that_fails_is_named_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "own_tasks.py").write_text(
        "def mixes(): return [{'id': 1, 'q': 'a' + 1}]\n"
        "def needs(x): return []\n"
        "def opens(): return list(open('nowhere.jsonl'))\n"
        "def breaks():\n    yield {'id': 1}\n    raise KeyError('boom')\n"
        "def opens_late():\n    for line in open('nowhere.csv'): yield {}\n"
    )
    monkeypatch.chdir(tmp_path)
    errors = {
        "mixes": "TypeError: can only concatenate str",
        "needs": "TypeError: needs() missing 1 required",
        "opens": "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.jsonl'",
        "breaks": "KeyError: 'boom'",
        "opens_late": "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.csv'",
    }
    assert refusal(f"own_tasks.py:{name}").startswith(f"graph.tasks: 'own_tasks.py:{name}' failed: {errors[name]}")


@pytest.mark.parametrize("name", ["tasks.csv", "tasks.json", "TASKS.JSONL", "data/tasks.txt", "./tasks"])
def test_another_file_is_told_which_files_can_be_read(name: str) -> None:
    assert refusal(name).startswith(
        f"graph.tasks: {name!r} is no file of tasks: those end in .jsonl, .jsonl.gz or .parquet"
    )
