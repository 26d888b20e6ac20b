"""A report into one HTML page that needs nothing else, and into the three files of a comparison.

Invariants: the page needs no network and runs no script, and texts from models stay text; report.json holds no NaN and
reads back as an equal `Report`; a file is there whole or not at all, and is its owner's alone. It does not know where
the numbers come from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from marft_bridge.comparison import views, wording
from marft_bridge.comparison.curve import learning_curve
from marft_bridge.comparison.markdown import report_to_markdown
from marft_bridge.comparison.numbers import counted, number, p_value, percent, signed, signed_span, span
from marft_bridge.comparison.records import Report
from marft_bridge.files import write_atomically
from marft_bridge.statistics import INTERVAL

_TEMPLATES = Path(__file__).parents[1] / "templates"
_LONGEST_NAME = 60  # characters, inside a sentence


def report_page(report: Report) -> str:
    """A report into one self-contained HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    filters = {f.__name__: f for f in (counted, number, p_value, percent, signed, signed_span)}
    environment.filters.update(filters, named=_named)
    return environment.get_template("report/page.html.j2").render(
        report=report,
        views=views,
        wording=wording,
        named=_named,
        span=span,
        learning_curve=learning_curve,
        interval_method=INTERVAL,
    )


def _shown(value: Any) -> Any:
    """What an expression of a template gives: text is made visible, drawings and numbers stay as they are."""
    return wording.visible(value) if type(value) is str else value


def _named(name: str) -> str:
    """A name inside a sentence; one too long to read is cut."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def write_report(report: Report, folder: Path) -> tuple[Path, Path, Path]:
    """A report into report.json, report.html and report.md in `folder`, each readable by its owner only."""
    content = json.dumps(report.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    texts = (content + "\n", report_page(report), report_to_markdown(report))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = (folder / "report.json", folder / "report.html", folder / "report.md")
    for path, text in zip(paths, texts, strict=True):
        write_atomically(path, text)
    return paths
