"""A report -> one self-contained HTML page, and the three files of a comparison.

Invariants: the page needs no network and runs no script, and texts from models stay text; report.json holds no NaN and
reads back as an equal `Report`; a file is written whole or not at all, and only its owner can read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from marft_bridge.common.files import write_atomically
from marft_bridge.comparison import views, wording
from marft_bridge.comparison.choice_plot import choice_plot
from marft_bridge.comparison.curve import learning_curve
from marft_bridge.comparison.markdown import report_to_markdown
from marft_bridge.comparison.numbers import counted, interval_text, number, p_value, percent, signed, signed_interval
from marft_bridge.comparison.records import Report
from marft_bridge.statistics import INTERVAL
from trace_store.files import make_folder

REPORT_FILES = ("report.json", "report.html", "report.md")
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_NAME_LENGTH = 60  # characters, inside a sentence


def report_page(report: Report) -> str:
    """A report into one self-contained HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_hidden_text,
    )
    filters = {f.__name__: f for f in (counted, number, p_value, percent, signed, signed_interval)}
    environment.filters.update(filters, format_name=_shorten_name)
    return environment.get_template("page.html.j2").render(
        report=report,
        views=views,
        wording=wording,
        format_name=_shorten_name,
        interval_text=interval_text,
        learning_curve=learning_curve,
        choice_plot=choice_plot,
        interval_method=INTERVAL,
    )


def report_style() -> str:
    """The style sheet of the page."""
    return (_TEMPLATES / "style.css").read_text(encoding="utf-8")


def _escape_hidden_text(value: Any) -> Any:
    """The value of a template's expression with the hidden characters of a text escaped; other values stay."""
    return wording.visible(value) if type(value) is str else value


def _shorten_name(name: str) -> str:
    """A name as it stands inside a sentence: at most `_LONGEST_NAME` characters, the rest cut off."""
    return name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"


def write_report(report: Report, folder: Path) -> tuple[Path, Path, Path]:
    """Writes report.json, report.html and report.md into `folder`, each readable by its owner only -> their paths.

    report.json is written last: what it says is in the other two as well, wherever this was killed.
    """
    content = json.dumps(report.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    texts = (content + "\n", report_page(report), report_to_markdown(report))
    make_folder(folder.resolve())  # its user may reach it by a link
    json_path, page_path, markdown_path = paths = tuple(folder / name for name in REPORT_FILES)
    for path, text in reversed([*zip(paths, texts, strict=True)]):
        write_atomically(path, text)
    return json_path, page_path, markdown_path
