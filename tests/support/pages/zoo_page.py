"""The files of examples/zoo/, and team_in_one -> docs/zoo.md: after what, topology, how it learns, what to expect.

`make pages` writes the page; test_zoo.py holds it equal to what is written.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.comparison.wording import EFFECT_MARKS, Effect
from support.paths import ROOT

ZOO = ROOT / "examples/zoo"
OWN_FOLDERS = (ROOT / "examples/team_in_one/bridge.toml",)
"""Configurations of the page that begin from what others trained, and so have a script, in a folder of their own."""
PAGE = ROOT / "docs/zoo.md"
_HEAD = re.compile(r"After (?P<after>.+?)\. Topology: (?P<topology>.+?)\.(?: (?P<more>[A-Z].*?))?$")

NOT_TRAINED = "not trained yet"
"""What `# Expected:` says of a configuration that nobody has run to its end yet. It gets no figures and no mark."""
_FIGURES = re.compile(
    r"(?P<metric>\w+) (?P<before>\S+) -> (?P<after>\S+) on (?P<tasks>\d+) held-out tasks "
    r"\((?P<diff>\S+), 95 % (?P<low>\S+) to (?P<high>\S+)\); reward by round [^;]*(; (?P<more>.*))?; "
    r"seed \d+, (?P<minutes>\d+) min( on [^,]*)?(?P<earlier>, earlier defaults)?"
    r"(?P<mended>, an earlier graph \([^()]*\))?"
)

INTRO = """# A zoo of graphs

Ordinary LangGraph graphs after systems of the field, each with tasks, a reward, a configuration and tests that
train it for some rounds on a stand-in for the model. They show that any topology is recorded, credited and updated,
and they are something to start from: copy the module and the configuration that are nearest to your app. Every
module in `graphs/` says what is the paper's and what is simplified; the tasks are small enough for a model of 135M
parameters on two processor cores.

```sh
marft-bridge collect --config examples/zoo/defer.toml
marft-bridge train --config examples/zoo/defer.toml
marft-bridge compare --config examples/zoo/defer.toml
```

`python -m examples.zoo.run defer` runs the three on one model server and prints the line that stands under
"expected", up to its minutes; what kind of machine they are of was added. Poker, tic-tac-toe, the negotiation and the
dilemmas are judged by a [tournament](comparison.md#a-tournament) too, and a configuration that begins
[from another one's run](training.md#from-another-runs-adapters) has that run first. Where two configurations differ in
the one thing that they are to tell apart, `python -m examples.zoo.twins prisma-two-stage` compares what the two runs
trained, on the held-out tasks of both. `team_in_one` begins from a trained duo:
`sh examples/team_in_one/run.sh runs/math_duo`. The figures are of one run with one
seed: by and large what to expect, no claim about a method. The runs marked with a circle settle nothing about their
graph.

Where the tasks are those of `graphs/math_duo.py` (its duos, solo, the chains, debate and verifier_refiner), of the
125 tasks that are held out, 75 differ from a training task only in names, things and the order of the two numbers.
`team_in_one` leaves these out. In supervisor, supervisor-partly-shared, dr-mas and comam 17 of the 57 that are held
out, and in defer 22 of the 33 sums that are, are a training task with its two numbers the other way round. In compact
14 of 54 differ from a training task in the objects alone.

**The figures with an asterisk are of the defaults that the trainer had before**: one pass over a round, both signs of
an advantage at their full weight, a learning rate of 0.0015, three steps a round. Their configurations name no learning
rate and no steps any more, so a run today goes by today's defaults; the figures were not made anew since. Five of them
(quartet, octet, twelve, compact and dr-mas) were of a second try, with a `kl_limit` of 0.12 nats a token, as it was
counted then; without it those defaults lost what the agents had.

**The figures with a dagger are of an earlier form of their graph**, which was mended since: what was otherwise stands
behind them under "expected". They were not made anew either.

Systems that look at images or videos (VideoChat-M1, MMedAgent-RL, ImageEdit-R1) are not here: they wait for messages
with images.

This page is written from the first lines of the configurations (`make pages`).
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration."""

    name: str
    source: str  # of the graph, from the root of the checkout
    config: str  # this file, from there
    after: str
    topology: str
    more: str  # what is special, if anything
    learns: str
    expected: str
    against: str | None  # its twin


def config_to_entry(path: Path) -> Entry:
    """What the first lines of a configuration say, and how it learns.

    Raises:
        ValueError: the first lines are not `# After ... . Topology: ... .` and `# Expected: ...`.
    """
    comments: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        comments.append(line[2:])
    expected = [line.removeprefix("Expected: ") for line in comments if line.startswith("Expected: ")]
    against = [line.removeprefix("Against: ") for line in comments if line.startswith("Against: ")]
    head = _HEAD.match(" ".join(line for line in comments if not line.startswith(("Expected: ", "Against: "))))
    if head is None or len(expected) != 1:
        raise ValueError(f"{path.name}: the first lines are not `# After ... . Topology: ... .` and `# Expected: ...`")
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    trainer = raw.get("train", {}).get("trainer", {})
    offline = trainer.get("offline", {}).get("mode", "awr")
    update = trainer.get("objective", {}).get("update")
    sides = trainer.get("sides")
    learns = [
        f"{trainer.get('advantage', {}).get('estimator', 'gae')} per {trainer.get('granularity', 'action')}",
        update and f"{update} updates",
        sides and f"{len(sides)} sides",
        f"offline {offline}",
        ", ".join(f"{term['level']} reward {term['reward']}" for term in trainer.get("shaping", [])),
    ]
    module = raw["graph"]["app"].split(":")[0]
    return Entry(
        config_to_name(path),
        module if module.endswith(".py") else f"{module.replace('.', '/')}.py",
        f"examples/{path.parent.name}/{path.name}",
        head["after"],
        head["topology"],
        head["more"] or "",
        "; ".join(part for part in learns if part),
        expected[0],
        against[0] if against else None,
    )


def config_to_name(path: Path) -> str:
    """What a configuration is called: a bridge.toml after its folder, any other after itself."""
    return path.parent.name if path.name == "bridge.toml" else path.stem


def entries_to_table(entries: list[Entry]) -> str:
    """What came out of each that was trained, in one look, and the names of the others.

    Raises:
        ValueError: an `# Expected:` is neither NOT_TRAINED nor as `python -m examples.zoo.run --write` writes it.
    """
    rows: list[str] = []
    further: list[str] = []
    effects: list[Effect] = []
    untrained = [entry.name for entry in entries if entry.expected == NOT_TRAINED]
    for entry in entries:
        if entry.expected == NOT_TRAINED:
            continue
        if (found := _FIGURES.fullmatch(entry.expected)) is None:
            raise ValueError(f"{entry.name}.toml: `# Expected: {entry.expected}` has no figures")
        effects.append("better" if float(found["low"]) > 0 else "worse" if float(found["high"]) < 0 else "not shown")
        difference = f"{EFFECT_MARKS[effects[-1]]} {found['diff']}"
        mark = (r" \*" if found["earlier"] else "") + (" †" if found["mended"] else "")
        rows.append(
            f"| [{entry.name}](#{entry.name}){mark} | {found['metric']} | {found['before']} | {found['after']} | "
            f"{difference} | {found['low']} to {found['high']} | {found['tasks']} | {found['minutes']} |"
        )
        if found["more"]:
            further.append(f"- [{entry.name}](#{entry.name}): {found['more']}.")
        if entry.against is not None:
            further.append(f"- [{entry.name}](#{entry.name}) against its twin: {entry.against}.")
    return "\n".join(
        [
            "## What came out",
            "",
            f"▲ better and ▼ worse by the 95 % interval, ○ not settled: {effects.count('better')} of {len(rows)} are "
            f"shown better, {effects.count('worse')} worse.",
            "",
            "| configuration | metric | before | after | difference | 95 % | held-out tasks | min |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *rows,
            "",
            *(["More than the metric:", "", *further, ""] if further else []),
            *([f"Not trained yet on the real model: {names_to_links(untrained)}.", ""] if untrained else []),
        ]
    )


def names_to_links(names: list[str]) -> str:
    """Links to the parts of the page about these configurations."""
    return ", ".join(f"[{name}](#{name})" for name in names)


def entries_to_page(entries: list[Entry]) -> str:
    """The page."""
    blocks = [
        f"## {entry.name}\n\n"
        f"After {entry.after}. `{entry.source}`, `{entry.config}`\n\n"
        f"- topology: {entry.topology}{'. ' + entry.more.rstrip('.') if entry.more else ''}\n"
        f"- learns by: {entry.learns}\n"
        f"- expected: {entry.expected}\n"
        f"{'' if entry.against is None else f'- against its twin: {entry.against}' + chr(10)}"
        for entry in entries
    ]
    return "\n".join([INTRO, entries_to_table(entries), *blocks])


def configs() -> list[Path]:
    """The configurations of the page, in its order."""
    return sorted([*ZOO.glob("*.toml"), *OWN_FOLDERS], key=lambda path: f"{config_to_name(path)}.toml")


def written() -> str:
    """The page as it should be now."""
    return entries_to_page([config_to_entry(path) for path in configs()])


def write() -> None:
    """Writes docs/zoo.md."""
    PAGE.write_text(written(), encoding="utf-8")
