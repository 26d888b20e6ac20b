"""What docs/store.md and docs/reference/tables.md show of questions, tables and views, from where they are declared.

Between two markers in the page stands what `rendered` gives; `make pages` puts it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent

from support.paths import ROOT

PAGE = ROOT / "docs/store.md"
TABLES_PAGE = ROOT / "docs/reference/tables.md"
BEGIN, END = "<!-- rendered: {} -->\n", "<!-- end -->\n"


def rendered() -> dict[str, str]:
    """The parts by name."""
    return {"tables": "".join(_tables()), "views": "".join(_views()), "questions": "".join(_questions())}


def filled(page: str) -> str:
    """A page with each of its parts as it is declared now."""
    for name, text in rendered().items():
        start, begin, rest = page.partition(BEGIN.format(name))
        if begin:
            _, end, tail = rest.partition(END)
            page = start + begin + text + end + tail
    return page


def _tables() -> Iterator[str]:
    from trace_store.schema import TABLES

    for table in TABLES:
        key = f" Key: {', '.join(f'`{name}`' for name in table.key)}." if table.key else ""
        yield f"\n### `{table.name}`\n\n{table.sentence}{key}\n\n| column | type | what it holds |\n|---|---|---|\n"
        for column in table.columns:
            kind, required, _ = column.sql_type.partition(" NOT NULL")
            yield f"| `{column.name}` | {kind}{'' if required else ', or NULL'} | {column.sentence} |\n"
    yield "\n"


def _views() -> Iterator[str]:
    from trace_store.views import VIEWS

    yield "\n| view | what it says |\n|---|---|\n"
    for view in VIEWS:
        yield f"| `{view.name}` | {view.sentence} |\n"
    yield "\n"


def _questions() -> Iterator[str]:
    from trace_store.queries import QUESTIONS

    for question in QUESTIONS:
        yield f"\n### {question.text}\n\n`{question.name}`. {question.answer}\n\n```sql{dedent(question.sql)}```\n"
    yield "\n"


def write() -> None:
    """Fills in both pages."""
    for page in (PAGE, TABLES_PAGE):
        page.write_text(filled(page.read_text()))
