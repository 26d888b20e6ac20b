"""A run folder full of hostile text, made by hand, and `marft-bridge view` on a run folder over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import httpx
import numpy as np
from tokenizers import Tokenizer, decoders, models

from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training.advantage_log import credits_to_file
from marft_bridge.view.pages import Pages
from marft_bridge.view.source import path_to_source
from marft_bridge.view.web import pages_to_server
from support.growth_rig import fill
from support.sample_spans import START, SampleTrace
from trace_store.records import Reward, RunRow
from trace_store.store import TraceStore
from trainers.credit.action_credits import ActionCredit

TOKEN, ONCE = "the-token-of-the-tests", "works-a-single-time"
HOSTILE = (
    "<script>window.owned=1;document.title='owned'</script><img src=x onerror='window.owned=1'>\"'\u202egnp.exe\x1b[2J"
)
SEEN = (
    r"<script>window.owned=1;document.title='owned'</script><img src=x onerror='window.owned=1'>"
    + "\"'\\u202egnp.exe\\x1b[2J"
)
EPISODE = "f" * 32
SECOND_NS = 10**9


@dataclass(frozen=True)
class Served:
    """A server on some pages, and a browser's worth of access to it."""

    port: int
    pages: Pages

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self, path: str, status: int = 200) -> str:
        """A page, for whoever has the token."""
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client:
            client.get("/style.css", params={"token": TOKEN})
            answer = client.get(path)
        assert answer.status_code == status, answer.text
        return answer.text


@contextmanager
def serving(path: Path, tokenizer: Path | None = None) -> Iterator[Served]:
    """The pages of a run folder or a store."""
    pages = Pages(path_to_source(path), tokenizer)
    with pages_to_server(pages, 0, TOKEN, ONCE) as server:
        yield Served(server.port, pages)


def save_tokenizer(folder: Path, texts: dict[int, str]) -> Path:
    """A tokenizer to which every id is a text of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {texts.get(i, f"w{i} "): i for i in range(max(texts) + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0 "))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def hostile_run(folder: Path) -> RunFolder:
    """One episode of round 1 of `train`, whose every text is hostile; token 4 is such a text too, token 5 is `fine`."""
    run = RunFolder(folder / "run")
    run.create()
    t = SampleTrace(EPISODE)
    node = t.node(f"{HOSTILE}:1", 10, 20, step=1)
    said = json.dumps([{"role": HOSTILE, "content": HOSTILE + "\n" + "long " * 9000}])
    called = json.dumps([{"role": "assistant", "content": HOSTILE, "tool_calls": [{"id": "c1", "name": HOSTILE}]}])
    texts: dict[str, Any] = {
        "RESPONSE_MODEL": HOSTILE,
        "FINISH_REASONS": [HOSTILE],
        "ADAPTER": f"{HOSTILE}@3",
        "ADAPTER_VERSION": 3,
    }
    t.call("x", node, 11, 14, INPUT_MESSAGES=said, OUTPUT_MESSAGES=called, **texts)
    t.call("y", t.node("b:1", 30, 40, step=2, after=(f"{HOSTILE}:1",)), 31, 39, OUTPUT_MESSAGES=said, LOGPROBS=None)
    root = {"TASK_ID": HOSTILE, "RUN_ID": "train", "ROUND": 1, "OUTCOME": "truncated", "OUTCOME_REASON": HOSTILE}
    spans = t.spans(**root, ADAPTERS=json.dumps({HOSTILE: 3}))
    rewards = [
        Reward(EPISODE, "reward", 0.5, HOSTILE, START),
        Reward(EPISODE, HOSTILE, 0.25, HOSTILE, START),
        Reward(EPISODE, HOSTILE, -1.0, HOSTILE, START, "step", "x"),
        Reward(EPISODE, HOSTILE, -1.0, HOSTILE, START, "agent", None, HOSTILE),
    ]
    fill(run.store, [[RunRow("train", "train", START), *spans, *rewards]])
    credit = ActionCredit(EPISODE, "x", np.array([-0.5, 0.5]), np.array([-2.0, 2.0]), {HOSTILE: np.array([-0.5, 0.5])})
    credits_to_file([credit], run.advantages, 1)
    tokenizer = save_tokenizer(folder / "model", {4: HOSTILE, 5: "fine"})
    config = {"model": {"path": str(tokenizer.parent)}, "train": {"trainer": {"reward": "reward"}}}
    (run.path / "bridge.json").write_text(json.dumps({"train": {"version": "1", "config": config}}))
    line = {"phase": "online", "round": 1, "agents": {HOSTILE: {"tokens": 2, "approx_kl": 0.01, "entropy": None}}}
    learned = {"actions": 2, "drops": {HOSTILE: 1}}
    offline = {"phase": "offline", "round": 0, "replay": {"mode": "filtered", "agents": {HOSTILE: learned}}}
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in (offline, line)))
    return run


def many_episodes(path: Path, count: int) -> Path:
    """Episodes of `train` a second apart: 4 tasks, rounds 1 and 2, rewards 0.0 to 0.9; every fifth one failed."""
    records: list[list[object]] = []
    for i in range(count):
        t = SampleTrace(f"{i:x}", START + i * SECOND_NS)
        t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
        outcome = {"OUTCOME": "failed", "OUTCOME_REASON": "boom"} if i % 5 == 0 else {}
        spans = t.spans(RUN_ID="train", ROUND=1 + i % 2, TASK_ID=f"t{i % 4}", SAMPLE=i, **outcome)
        records.append([*spans, Reward(t.trace_id, "reward", i % 10 / 10, "test", START)])
    fill(path, records)  # type: ignore[arg-type]
    return path


def grown_store(path: Path, count: int) -> Path:
    """As many episodes of `train` as a long run leaves: two calls of some hundred words each, two rewards, five spans.

    Written by SQL, in the order of time, as an intake would leave them; `needle` stands in the oldest prompt only.
    """
    TraceStore.open(path).close()
    with duckdb.connect(str(path)) as con:
        con.execute(
            "CREATE TEMP TABLE n AS SELECT i, md5(i::VARCHAR) AS id,"  # noqa: S608 - numbers
                    f" {START} + i * 2::BIGINT * {SECOND_NS} AS t FROM range({count}) r(i)")  # fmt: skip
        con.execute(
            """INSERT INTO episodes BY NAME SELECT id AS episode_id, 'train' AS run_id, 'task-' || i % 500 AS task_id,
            'train' AS split, i % 8 AS sample, i // 1000 AS "round", '{"reasoner":' || i // 1000 || '}' AS adapters,
            CASE WHEN i % 50 = 0 THEN 'failed' ELSE 'terminated' END AS outcome, t AS started_ns,
            t + 1500000000 AS ended_ns, 5 AS span_count, '{"question":"what is ' || i || ' plus 1?"}' AS task,
            CASE WHEN i % 10 = 0 THEN '{"beta":""}' ELSE '{}' END AS tags,
            CASE WHEN i % 20 = 0 THEN 'thread-' || i // 60 END AS thread_id FROM n"""
        )
        con.execute(
            """INSERT INTO actions BY NAME SELECT id || '-' || k AS action_id, id AS episode_id,
            CASE k WHEN 0 THEN 'reasoner' ELSE 'actor' END AS node, k AS index, k + 1 AS step,
            [i % 1000, 2, 3] AS prompt_ids, [4, 5, 6, 7] AS sampled_ids, [-0.1, -0.2, -0.3, -0.4] AS logprobs,
            'reasoner@' || i // 1000 AS adapter, i // 1000 AS adapter_version, 'stop' AS finish_reason,
            'the answer number ' || i + 1 AS completion, t + k * 500000000 AS started_ns, t AS episode_started_ns,
            t + 400000000 + k * 500000000 AS ended_ns, true AS trainable FROM n, range(2) r(k)"""
        )
        con.execute("INSERT INTO edges SELECT id, id || '-0', id || '-1', 'trigger', true, t FROM n")
        con.execute("INSERT INTO rewards SELECT id, name, (i * 7 % 10) / 10, 'test', t + 2000000000, 'episode', NULL,"
                    " NULL FROM n, (VALUES ('correct'), ('brief')) w(name)")  # fmt: skip
        con.execute(
            """INSERT INTO spans SELECT id, CASE k WHEN 0 THEN 'root' ELSE id || '-' || k - 3 END,
            CASE k WHEN 0 THEN NULL WHEN 1 THEN 'root' WHEN 2 THEN 'root' ELSE id || '-' || k - 5 END, 'span',
            ['invoke_workflow', 'invoke_agent', 'invoke_agent', 'chat', 'chat'][k + 1], t + k, t + 1000 + k, 'ok', NULL,
            'genai-0.1.0/marft-2', CASE WHEN k < 3 THEN json_object('marft.node', 'reasoner') ELSE json_object(
              'marft.node', 'reasoner', 'gen_ai.input.messages', json_array(json_object('role', 'system', 'content',
              repeat('You are a careful mathematician. ', 20)), json_object('role', 'user', 'content',
              CASE WHEN i = 0 THEN 'needle ' ELSE '' END || 'what is ' || i || ' plus 1?'))::VARCHAR,
              'gen_ai.output.messages', json_array(json_object('role', 'assistant', 'content',
              'Let me think about ' || i || ': ' || repeat('so then ', 30) || md5(i::VARCHAR)))::VARCHAR) END
            FROM n, range(5) r(k) ORDER BY t"""
        )
    return path
