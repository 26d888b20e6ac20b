"""The pins in cpu.txt -> a virtual environment that runs everything without a GPU: `make setup`.

Invariants: the stamp in the environment holds the digest of the files that it was made from only when every step has
ended well, so that a second run has nothing to do, and a run that was cut off is done again from the start; only files
whose hashes are known are installed (cpu.lock; for torch torch.sha256, or what MARFT_TORCH_SHA256 says), and no
package's own code runs while it is.

It asks pip as the machine has configured it; another index is asked for torch alone, and only where MARFT_TORCH_INDEX
names it. It uses the standard library only, since it runs before anything is installed, and syntax that an old Python
can read, so that such a Python gets a clear answer.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

OLDEST_PYTHON = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_INDEX_VARIABLE = "MARFT_TORCH_INDEX"
TORCH_HASH_VARIABLE = "MARFT_TORCH_SHA256"
UNFINISHED = "unfinished"

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "cpu.txt"
LOCK = ROOT / "requirements" / "cpu.lock"
TORCH_HASHES = ROOT / "requirements" / "torch.sha256"
PROJECT = ROOT / "pyproject.toml"
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "marft-setup.stamp"


class SetupError(Exception):
    """A step failed in a way that the user can put right. The message is what to do."""


def digest_of_inputs() -> str:
    """The pins, their hashes and the project file -> one SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    for path in (PINS, LOCK, PROJECT):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def python_of_environment() -> Path:
    """The environment's interpreter, whether or not it exists yet."""
    return ENVIRONMENT / "bin" / "python"


def stamp_of_environment() -> str | None:
    """What the last run left behind: a digest, UNFINISHED, or None for an environment that is not ours or not there.

    An interpreter that is gone (the system's Python was upgraded) counts as unfinished.
    """
    if not STAMP.exists():
        return None
    return STAMP.read_text().strip() if python_of_environment().exists() else UNFINISHED


def torch_pin() -> str:
    """The line of the pins that names torch."""
    return next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))


def pip_install(*arguments: str) -> None:
    """Run the environment's pip; its own words reach the terminal. Raises SetupError."""
    command = [str(python_of_environment()), "-m", "pip", "install", "--no-deps", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        raise SetupError("pip failed; its last lines above say why. `make setup` starts over.")


def install_torch() -> None:
    """Torch first, from a file whose hash is known. Raises SetupError."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = download_torch(Path(folder))
        refuse_unknown_torch(wheel)
        pip_install(str(wheel))


def download_torch(folder: Path) -> Path:
    """The file of torch that pip chooses. Where its CPU build is missing, says what to add, not a resolver's error."""
    pin = torch_pin()
    index = os.environ.get(TORCH_INDEX_VARIABLE)
    index_arguments = [] if index is None else ["--index-url", index]
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), *index_arguments]
    command = [str(python_of_environment()), "-m", "pip", "download", *options, pin]
    run = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if "No matching distribution found for torch" in run.stderr:
        python = ".".join(str(part) for part in sys.version_info[:2])
        raise SetupError(
            f"pip does not find {pin}, the CPU build of PyTorch, for Python {python}. Take it from PyTorch's own "
            f"index, and nothing else: {TORCH_INDEX_VARIABLE}={TORCH_CPU_INDEX} make setup"
        )
    sys.stderr.write(run.stderr)
    wheels = list(folder.glob("torch-*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        raise SetupError(f"pip could not fetch {pin}; its last lines above say why. `make setup` starts over.")
    return wheels[0]


def refuse_unknown_torch(wheel: Path) -> None:
    """Raises SetupError unless the file's hash is the one in torch.sha256, or the one that the user has compared."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    known = [line.split() for line in TORCH_HASHES.read_text().splitlines()] if TORCH_HASHES.exists() else []
    if digest == os.environ.get(TORCH_HASH_VARIABLE, "").lower() or [digest, wheel.name] in known:
        return
    raise SetupError(
        f"{wheel.name} has a SHA-256 that {TORCH_HASHES.name} does not know. Compare it with the one that PyTorch's "
        f"index shows for the file, and if it is the same: {TORCH_HASH_VARIABLE}={digest} make setup"
    )


def create_environment() -> None:
    """An environment marked unfinished: a fresh one, unless a finished one, or the user's own, is there to update."""
    fresh = stamp_of_environment() == UNFINISHED or not python_of_environment().exists()
    if fresh:
        try:
            venv.create(ENVIRONMENT, clear=True, symlinks=True, with_pip=True)
        except subprocess.CalledProcessError as error:
            raise SetupError(
                f"Python could not make {ENVIRONMENT.name}: install your system's venv package (Debian: python3-venv)."
            ) from error
    STAMP.write_text(UNFINISHED + "\n")


def set_up() -> None:
    """Bring the environment to what the pins say, or do nothing when it is there already. Raises SetupError."""
    wanted = digest_of_inputs()
    if stamp_of_environment() == wanted:
        return
    with PINS.open() as pins:
        fcntl.flock(pins, fcntl.LOCK_EX)  # a second `make` meanwhile waits, and then has nothing to do
        if stamp_of_environment() == wanted:
            return
        print(f"Setting up {ENVIRONMENT.name}: about 4 GB on disk and a few minutes, once.", flush=True)
        create_environment()
        install_torch()
        pip_install("--require-hashes", "--only-binary", ":all:", "-r", str(LOCK))
        pip_install("--no-build-isolation", "-e", str(ROOT))  # setuptools is among the pins
        STAMP.write_text(wanted + "\n")


def main() -> int:
    """Exit status 0 when the environment is ready, 1 after one line that says what to do."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(str(part) for part in sys.version_info[:3])
        advice = "make setup PYTHON=python3.11"
        print(f"setup: Python 3.11 or newer is needed and {sys.executable} is {found}: {advice}", file=sys.stderr)
        return 1
    try:
        set_up()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; `make setup` starts over.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
