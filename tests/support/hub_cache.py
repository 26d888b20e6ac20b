"""A model directory -> a snapshot in a cache of the Hugging Face Hub, laid out as `hf download` leaves it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

NAME = "acme/tiny-llama"


def put_in_cache(cache: Path, model_dir: Path, commit: str, name: str = NAME, branch: str | None = "main") -> Path:
    """The files become blobs, to which a snapshot links; the branch, if any, is at this commit from now on."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in model_dir.iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    if branch is not None:
        (repository / "refs" / branch).write_text(commit)
    return snapshot
