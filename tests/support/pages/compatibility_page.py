"""The suite of apps (tests/apps) -> docs/compatibility.md: what each needs to be recorded and trained, and its D.

The versions are those of requirements/cpu.txt, the rest is worked out by hand in `apps.by_hand`, with which
tests/apps/test_suite.py compares the record; apps_of_others.md is put after it. `make pages` writes the page.
"""

from __future__ import annotations

import ast
from pathlib import Path

from apps.by_hand import FOLDER, RECORDING_LINES, SUITE, SuiteApp

from support.paths import ROOT

PAGE = ROOT / "docs/compatibility.md"
_PACKAGES = ("langgraph", "langchain", "langchain-core", "langchain-openai")
INTRODUCTION = """# Apps that it works with

{count} apps after published packages and patterns, each written as its author would write it, without a thought of this
tool. A test takes every one of them all the way (`tests/apps`):

1. recorded by `wrap`, it asks its provider the same, word by word, and ends with the same;
2. `marft-bridge init app.py:graph --probe --yes` lists its agents by the names under which they are trained;
3. `marft-bridge collect` takes what `init` wrote, unedited, on a stand-in for the model server: every call of an
   episode has its exact tokens and goes to the adapter of its agent;
4. `traces show` draws the run, `traces doctor` finds nothing wrong;
5. who acted, and every edge of D, is what was worked out by hand from the app's text.

The versions are {versions}, and those in the table; [Versions](versions.md) has all others.

| app | after | with | lines to record | lines to train | options | agents | exact edges | bounds |
|---|---|---|---:|---:|---|---:|---|---|
"""

EXPLANATION = """
*Lines to record*: `from marft_bridge import wrap` and `graph = wrap(graph, "traces.duckdb")`, at the end of the app.
*Lines to train*: what changes in the app for `init`, `collect` and what follows; its tasks and reward, which may lie
in any file, stand at the end of each. *Options*: what `init` must be told besides `--tasks` and `--reward`, and
writes into `bridge.toml`. *Agents*: those that act on the first task. *Exact edges* and *bounds* are counted over the
runs of the test, by kind ([what they mean](recording.md#dependencies)).

A pattern without a package was written anew after its documentation, with LangGraph and LangChain alone.
"""

OTHERS = (Path(__file__).parent / "apps_of_others.md").read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    """Package -> its version in requirements/cpu.txt."""
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    return dict(line.split("==", maxsplit=1) for line in lines if line and not line.startswith("#"))


def code(text: str) -> str:
    """As Markdown writes code."""
    return f"`{text}`"


def counts_to_text(counts: dict[str, int]) -> str:
    """`{"data": 3, "tool": 1}` -> `3 data, 1 tool`."""
    return ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts)) or "none"


def app_to_row(name: str, app: SuiteApp, versions: dict[str, str]) -> str:
    """One line of the table."""
    package = f"{app.package} {versions[app.package]}" if app.package else "pattern"
    options = " ".join(f"`--{option}`" for option in ("context",) if getattr(app, option) is not None)
    cells = [
        f"[{name}](#{name})",
        app.after,
        package,
        str(RECORDING_LINES),
        "0",
        options or "none",
        str(len(set(app.agents))),
        counts_to_text(app.edges_by_exactness(">")),
        counts_to_text(app.edges_by_exactness("?")),
    ]
    return f"| {' | '.join(cells)} |\n"


def app_to_section(name: str, app: SuiteApp) -> str:
    """What is special about one app, and its D."""
    purpose = " ".join((ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or "").split())
    agents = ", ".join(map(code, dict.fromkeys(app.agents)))
    lines = [f"\n## {name}\n\n{purpose} The app: `tests/apps/{name}.py`.\n"]
    lines.append(f"- agents: {agents}")
    if app.silent_agents:
        lines.append(f"- listed too, and not called on the first task: {', '.join(map(code, app.silent_agents))}")
    if app.bounds_why:
        lines.append(f"- bounds, because {app.bounds_why}")
    if app.notes:
        lines.append(f"- {app.notes}")
    runs = [("", app.edges), *((f" of run {n}", edges) for n, edges in enumerate(app.later_edges, start=2))]
    for title, edges in runs:
        lines += [f"- {kind}{title}: {', '.join(map(code, sorted(edges[kind].split())))}" for kind in sorted(edges)]
    return "\n".join(lines) + "\n"


def written() -> str:
    """The page as it should be now."""
    versions = pins()
    main_versions = ", ".join(f"{name} {versions[name]}" for name in _PACKAGES)
    introduction = INTRODUCTION.format(count=len(SUITE), versions=main_versions)
    rows = "".join(app_to_row(name, app, versions) for name, app in SUITE.items())
    sections = "".join(app_to_section(name, app) for name, app in SUITE.items())
    return introduction + rows + EXPLANATION + "\n" + OTHERS + sections


def write() -> None:
    """Writes docs/compatibility.md."""
    PAGE.write_text(written(), encoding="utf-8")
