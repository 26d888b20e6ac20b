"""The six apps of docs/your-app.md: what they change to be recorded and trained, from examples/wrapping/.

Between two markers in the page stands what `apps` gives; `make pages` puts it there.
"""

from __future__ import annotations

from support.paths import ROOT

FOLDER = ROOT / "examples/wrapping"
PAGE = ROOT / "docs/your-app.md"
BEGIN, END = "<!-- rendered: six apps -->\n", "<!-- end -->\n"

# Folder -> heading, and what to know.
GUIDES = {
    "chat_openai": (
        "Plain nodes with ChatOpenAI",
        "Each node calls a chat model of its own. `wrap` gives back a graph of the same class, so everything that\n"
        "used the graph uses the recorded one. The planner's `temperature=0` is what it asks its own provider\n"
        "for; while it is trained, `[sampling]` decides.",
    ),
    "create_agent": (
        "An agent of create_agent",
        "The LLM node of such an agent is called `model`, the one that runs its tools `tools`. Both calls of a\n"
        "question, before and after the tool, are actions of one agent, with a `tool` edge between them.",
    ),
    "supervisor": (
        "A supervisor",
        "The agents have the names that `create_agent(name=...)` gave them; the supervisor, which declares none, has\n"
        "the path of its LLM node, `supervisor/agent`. Its routing is what it says, so training it trains the\n"
        "routing. Three agents need six adapter slots, as each has its version before and after.",
    ),
    "swarm": (
        "A swarm",
        "Who acts is decided by handoffs, which are tool calls of the agents. A handoff is a `trigger` edge from\n"
        "the agent that hands over to the one that takes over.",
    ),
    "langgraph_json": (
        "An app with a langgraph.json",
        "The graph is made by a function for each run, so there is no one graph to wrap: `instrument` records all\n"
        "graphs of the process. `graph.app` is the name in the file, whose\n"
        "`env` and `dependencies` hold for the commands, too. Without any change of the code:\n"
        "`MARFT_STORE=traces.duckdb opentelemetry-instrument python app.py`.",
    ),
    "openinference": (
        "An app that OpenInference traces",
        "Both record, each through a tracer provider of its own: OpenInference's spans go where they went. It copies\n"
        "each node's input, so `data` edges of async runs are upper bounds. Where two lines are too many, point the\n"
        "exporter at `marft-bridge ingest --listen` ([ingest.md](ingest.md)); such traces have no token ids, so they\n"
        "can be looked at and imitated, not learned from on-policy.",
    ),
}
INTRODUCTION = """
| app | lines changed to record | lines of bridge.toml | together |
|---|---|---|---|
"""
AFTER = """
A changed line is one that the diff takes away or adds; of `bridge.toml` every line counts that is neither empty nor a
comment. The configuration needs no change of the app: leave the diff out and `collect` records all the same. With
it, the app's own runs are recorded into `traces.duckdb`, wherever they happen; a run by a command goes into that
command's run folder only.

The tasks are `examples/wrapping/tasks.jsonl`, in which every app finds what it takes (`question`, or `messages`).
What is right is called `gold` and not `answer`: a task is the graph's input as it is, and a field with the name of a
state key would become part of the state. `graph.task_to_input` names a function where that is not what you want.
[tasks.md](tasks.md) has the other places where tasks come from.

The test has a stand-in for the model. On a real vLLM with SmolLM2-135M-Instruct each was collected once, six episodes
with its `bridge.toml` as it is, and every call was trainable. A model of that size does not call tools or hand over by
itself: in the agent, the supervisor and the swarm only the first node spoke. Take a larger one for these, which is two
lines more that the table does not count: `[model]` and its `path`.

To try one, go into its folder, for the names in its `bridge.toml` are relative to where a command runs.
`record.diff` is what the user changes, for `patch`; the apps that call a provider want its key (`OPENAI_API_KEY`)
when they run by themselves, and not under `marft-bridge collect`, which answers the calls of their nodes itself.
`make setup` has the packages that they import, `langgraph-supervisor` and `langgraph-swarm` among them.
"""


def diff_to_changed(diff: str) -> int:
    """Lines that are taken away or added; empty ones too."""
    return sum(line[0] in "+-" and not line.startswith(("--- ", "+++ ")) for line in diff.splitlines())


def toml_to_counted(text: str) -> int:
    """Lines that say something."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def filled(page: str) -> str:
    """The page with the apps as their files are now."""
    start, begin, rest = page.partition(BEGIN)
    assert begin, "docs/your-app.md has no place for the apps"
    _, end, tail = rest.partition(END)
    return start + begin + apps() + end + tail


def apps() -> str:
    """A table of the apps, and what each changes."""
    table, sections = "", ""
    for name, (heading, said) in GUIDES.items():
        diff, toml = ((FOLDER / name / file).read_text() for file in ("record.diff", "bridge.toml"))
        changed, counted = diff_to_changed(diff), toml_to_counted(toml)
        table += f"| [{heading}](#{heading.lower().replace(' ', '-').replace('.', '')}) | {changed} | {counted} | "
        table += f"{changed + counted} |\n"
        app = f"examples/wrapping/{name}/app.py"
        sections += f"\n### {heading}\n\n{said}\n\nTo record, {changed} lines (the app is `{app}`):\n\n"
        sections += f"```diff\n{diff}```\n\nTo train, `bridge.toml`, {counted} lines:\n\n```toml\n{toml}```\n"
    return INTRODUCTION + table + AFTER + sections + "\n"


def write() -> None:
    """Fills in docs/your-app.md."""
    PAGE.write_text(filled(PAGE.read_text()))
