"""A source file -> whether it is a library's or the user's own.

Invariant: what was installed is a library's, in whichever layer of the environment it lies; a package that was
installed editable is one too, unless it lies in the project of the app or of the working folder.
"""

from __future__ import annotations

import functools
import json
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

_INSTALL_FOLDERS = {"site-packages", "dist-packages"}
_OUR_PACKAGE = Path(__file__).parents[1]
_PROJECT_MARKS = (".git", "pyproject.toml", "setup.py", "langgraph.json")


class UserCode:
    """The code of one user: that of the app, and of what lies in the same project."""

    def __init__(self, app_name: str | None) -> None:
        """`app_name` as in graph.app; None: only the working folder says whose code is whose."""
        projects = {_project_of(folder) for folder in (Path.cwd(), _name_to_folder(app_name)) if folder is not None}
        self._library_roots = _library_roots() + tuple(
            root
            for root in _editable_roots()
            if not any(root.is_relative_to(project) or project.is_relative_to(root) for project in projects)
        )
        self._answers: dict[str, bool] = {}  # a walk asks for the same few files again and again

    def is_library_file(self, file: str) -> bool:
        """Whether code of this file belongs to Python or to an installed package."""
        answer = self._answers.get(file)
        if answer is None:
            answer = self._answers[file] = file.startswith("<frozen") or (bool(file) and self._lies_in_library(file))
        return answer

    def _lies_in_library(self, file: str) -> bool:
        path = Path(file).absolute()
        return not _INSTALL_FOLDERS.isdisjoint(path.parts) or any(
            each.is_relative_to(root) for root in self._library_roots for each in (path, path.resolve())
        )


def error_to_place(error: BaseException, code: UserCode) -> str | None:
    """The innermost line of the user's own code that an error came through, as `file:line`; None for none."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames_to_place(((frame.filename, frame.lineno or 0) for frame in reversed(frames)), code)


def frames_to_place(frames: Iterable[tuple[str, int]], code: UserCode) -> str | None:
    """The first of these files and lines, the innermost first, that is the user's, as `file:line`; None for none."""
    for file, line in frames:
        if not code.is_library_file(file) and not _is_ours(file):
            path = Path(file)
            name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f"{name}:{line}"
    return None


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(_OUR_PACKAGE)


def _name_to_folder(app_name: str | None) -> Path | None:
    """The folder of the module that the name of a loaded app leads to."""
    module, colon, _ = (app_name or "").rpartition(":")
    if not colon:
        return None
    file = module if module.endswith((".py", ".json")) else getattr(sys.modules.get(module), "__file__", None)
    return Path(file).absolute().parent if file else None


@functools.cache
def _library_roots() -> tuple[Path, ...]:
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({path for folder in folders for path in (Path(folder), Path(folder).resolve())})


def _project_of(folder: Path) -> Path:
    """The outermost folder around it that is marked as a project's; else the folder."""
    folder = folder.resolve()
    marked_folders = [
        path for path in (folder, *folder.parents) if any((path / mark).exists() for mark in _PROJECT_MARKS)
    ]
    return marked_folders[-1] if marked_folders else folder


@functools.cache
def _editable_roots() -> tuple[Path, ...]:
    return tuple(_read_editable_roots())


def _read_editable_roots() -> Iterator[Path]:
    for distribution in metadata.distributions():
        try:
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):
                yield Path(unquote(urlsplit(origin["url"]).path)).resolve()
        except (OSError, ValueError, KeyError, AttributeError):  # metadata that says nothing readable of its origin
            continue
