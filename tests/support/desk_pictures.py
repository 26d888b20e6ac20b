"""The desk of examples/hosted_to_local on stand-in models -> docs/hosted-to-local-worse.png: where it is worse locally.

`make pictures` writes it; tests/docs/test_desk_pictures.py holds that the page still says this. Invariant: graph,
recording, comparison and page are real; what the models answer is invented, and docs/hosted-to-local.md says so.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import Image
from rich.console import Console

from examples.hosted_to_local import orders
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import compare
from marft_bridge.comparison.records import Report
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.serve import ServeOptions
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from support.browser import browsing
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm, running
from support.paths import ROOT
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

PICTURE = ROOT / "docs/hosted-to-local-worse.png"
EXAMPLE = ROOT / "examples/hosted_to_local"
WIDTH, COLOURS = 900, 128
# Leaves the cohorts, those that lost, and the runs of the first task in them.
_ONLY_COHORTS = """(() => {
  const kept = ['Cohorts', 'Cohorts that lost'];
  for (const part of document.querySelectorAll('main > *, footer')) {
    const heading = part.querySelector('h2');
    if (!heading || !kept.includes(heading.innerText)) part.remove();
  }
  document.querySelector('details').open = true;
  document.querySelectorAll('details:not([open])').forEach(task => task.remove());
  document.querySelector('h2').style.marginTop = '0';
})()"""
_EDGES = """(() => {
  const {top, bottom} = document.querySelector('main').getBoundingClientRect();
  return [top, bottom].map(Math.round);
})()"""
_MARGIN = 20  # px


def answers(is_local: bool) -> Callable[[Mapping[str, Any]], str]:
    """What a model says: what is right, but that the local lookup quotes a price for half of the stock questions."""
    oracle = orders.Oracle([*orders.tasks(), *orders.lessons()])

    def answer(body: Mapping[str, Any]) -> str:
        profile, text = (str(message["content"]) for message in body["messages"])
        said = oracle.answer(profile, text)
        if is_local and said.startswith("stock(") and random.Random(text).random() < 0.5:
            return said.replace("stock(", "quote(").replace(")", ", 1)")
        return said

    return answer


def compare_desk(folder: Path, tasks: int) -> Report:
    """The hosted desk beside the local one, in an empty folder; the report's files are in its `run`."""
    run, model = folder / "run", save_model(folder / "model")
    registry = AdapterRegistry(run / "adapters", weights_to_sha256(model))
    run.mkdir()
    for node in ("extractor", "router", "lookup", "writer"):
        for version in (0, 1):
            write_zero_adapter(registry.new_folder(node, version), model, ("q_proj", "v_proj"))
            registry.register(node, version, None, {})
    TraceStore.open(run / "store.duckdb").close()
    with running(FakeVllm()) as ours, running(FakeVllm()) as hosted:
        ours.answer, hosted.answer = answers(True), answers(False)
        hosted.adapters["hosted-large"] = ""
        changes = {
            "run": str(run),
            "model.path": str(model),
            "collect.in_flight": 4,
            "compare.tasks": tasks,
            "compare.variants": [{"name": "hosted", "own_models": True}, {"name": "local", "adapters": 1}],
            "sampling.max_tokens": 64,  # the stand-in's tokens are shorter
            "train.traces": [],
        }
        environment = {"HOSTED_BASE_URL": f"{hosted.url}/v1", "HOSTED_MODEL": "hosted-large"}
        config = toml_to_config(EXAMPLE / "bridge.toml", changes)
        config = config.model_copy(update={"serve": ServeOptions(attach=ours.url)})
        with patch.dict(os.environ, environment):
            return compare(config, Reporter(Console(quiet=True)), resume=False)


def photograph(page: Path, picture: Path, profile: Path) -> str:
    """Writes the picture of a report's page; returns the words on it."""
    with browsing(profile) as browser:
        browser.look(WIDTH)
        browser.open(page.as_uri())
        browser.run(_ONLY_COHORTS)
        browser.shoot(picture)
        words = str(browser.run("document.body.innerText"))
        top, bottom = browser.run(_EDGES)
    with Image.open(picture) as shot:
        part = shot.crop((0, max(0, top - _MARGIN), WIDTH, min(shot.height, bottom + _MARGIN)))
        part.convert("RGB").quantize(COLOURS).save(picture, optimize=True)
    return words


def write() -> None:
    """Writes the picture anew."""
    with tempfile.TemporaryDirectory() as scratch:
        compare_desk(Path(scratch), tasks=90)
        photograph(Path(scratch, "run/report.html"), PICTURE, Path(scratch, "profile"))


if __name__ == "__main__":
    write()
