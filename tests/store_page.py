"""What docs/store.md shows of tables, views and questions, rendered from where they are declared.

Between two markers in the page stands what `rendered` gives; `python tests/store_page.py` puts it there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/store.md"
BEGIN, END = "<!-- rendered: {} -->\n", "<!-- end -->\n"


def rendered() -> dict[str, str]:
    """The page's parts by name."""
    return {"tables": "".join(_tables()), "views": "".join(_views()), "questions": "".join(_questions())}


def filled(page: str) -> str:
    """The page with each part as it is declared now."""
    for name, text in rendered().items():
        before, begin, rest = page.partition(BEGIN.format(name))
        assert begin, f"docs/store.md has no place for {name}"
        _, end, after = rest.partition(END)
        page = before + begin + text + end + after
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
        yield f"\n### {question.words}\n\n`{question.name}`. {question.answer}\n\n```sql{dedent(question.sql)}```\n"
    yield "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(filled(PAGE.read_text()))
