"""Owns: what the project says about itself to pip, git and people.

- Every requirement of pyproject.toml has a pin in requirements/cpu.txt that satisfies it, and the pins are closed:
  what a pinned distribution needs is pinned too, in a version that suits it, but for the few that must stay away and
  one that no index need have yet.
- The distributions that break transformers on a machine without CUDA are not among the pins.
- The wheel holds the four packages with all their files, and the console script leads somewhere.
- The sdist has all that is tracked but git's and Docker's own lists, and runs its tests.
- The citation, the changelog and the Dockerfile go with the project's version, license and folders.
- No tracked file names a path of somebody's machine or the host of a package registry.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("marft_bridge", "trace_store", "trainers")
DELIBERATELY_ABSENT = {
    *("cellpylib", "drawsvg", "pycosat", "zss"),
    "boto3",
    *("llama-cpp-python", "llm", "torchaudio", "torchcodec", "torchvision"),
}
# Distribution, what it declares and the pins do not satisfy, the pin that works all the same. The head of
# requirements/cpu.txt says why.
DELIBERATELY_OTHER = {
    ("langchain-core", "certifi>=2026.10.19", "2026.10.18"),
    ("litellm", "certifi>=2026.10.19", "2026.10.18"),
    ("litellm", "huggingface-hub>=0.34.0,<2.0", "2.4.0"),
}


def pins() -> dict[str, Version]:
    """requirements/cpu.txt -> canonical name -> its one version."""
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    found = {canonicalize_name(name): Version(version) for name, version in pairs}
    assert len(found) == len(pairs), "a name is pinned twice"
    return found


def locked_hashes() -> dict[tuple[str, Version], list[str]]:
    """requirements/cpu.lock -> canonical name and version -> the hashes of its files."""
    text = (ROOT / "requirements" / "cpu.lock").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    entries = [
        (line.split()[0].split("=="), re.findall(r"--hash=sha256:([0-9a-f]{64})(?: |$)", line)) for line in lines
    ]
    return {(canonicalize_name(name), Version(version)): hashes for (name, version), hashes in entries}


def test_every_pin_but_torch_is_locked_by_hashes_and_nothing_else_is() -> None:
    hashes = locked_hashes()
    assert set(hashes) == {(name, version) for name, version in pins().items() if name != "torch"}
    assert [name for name, of_files in hashes.items() if not of_files] == []


def declared_requirements() -> list[Requirement]:
    """pyproject.toml -> what the pins must satisfy: everything but the CUDA server and what has pins of its own
    (requirements/loggers.txt, requirements/qlora.txt)."""
    project = PROJECT["project"]
    apart = {"cuda", "mlflow", "qlora", "trackio", "wandb"}
    extras = [r for extra, lines in project["optional-dependencies"].items() if extra not in apart for r in lines]
    extras = [line for line in extras if Requirement(line).name != project["name"]]  # an extra within another
    return [Requirement(line) for line in (*project["dependencies"], *extras, *PROJECT["build-system"]["requires"])]


def tracked_files() -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=False, capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in run.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_every_declared_requirement_is_satisfied_by_a_pin() -> None:
    versions = pins()
    wrong = [
        str(requirement)
        for requirement in declared_requirements()
        if (version := versions.get(canonicalize_name(requirement.name))) is None
        or version not in requirement.specifier
    ]
    assert not wrong


def test_every_requirement_of_an_installed_pin_is_pinned_in_a_version_that_suits_it() -> None:
    versions = pins()
    wanted = {
        (name, line)
        for distribution in distributions()
        if (name := canonicalize_name(distribution.name)) in versions
        for line in distribution.requires or ()
    }
    if not wanted:
        pytest.skip("none of the pins is installed here")
    wrong = []
    for name, line in sorted(wanted):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = canonicalize_name(requirement.name)
        if needed in DELIBERATELY_ABSENT or (name, line, str(versions.get(needed))) in DELIBERATELY_OTHER:
            continue
        if needed not in versions or not requirement.specifier.contains(versions[needed], prereleases=True):
            wrong.append(f"{name} needs {line}, pinned is {versions.get(needed)}")
    assert not wrong


def test_what_breaks_transformers_without_cuda_is_not_pinned() -> None:
    names = set(pins())
    assert names & DELIBERATELY_ABSENT == set()
    assert [name for name in names if name.startswith(("nvidia-", "cuda-"))] == []


def test_the_only_torch_is_the_cpu_build() -> None:
    assert pins()["torch"].local == "cpu"


def test_the_wheel_holds_every_file_of_the_three_packages_and_no_other(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since building leaves folders behind
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("graphs", "tests"):  # which must not get into it
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))

    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=source, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("marft_bridge-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {
        p.relative_to(source).as_posix() for package in PACKAGES for p in (source / package).rglob("*") if p.is_file()
    }
    assert packed == written


@pytest.mark.slow
@pytest.mark.timeout(600)  # it collects every test of the project
def test_the_sdist_can_run_its_tests_and_has_what_they_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in tracked_files():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=source, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    packed = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    absent = {path.relative_to(ROOT).as_posix() for path in tracked_files()} - packed
    assert absent == {".dockerignore", ".gitignore"}

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments in (["--collect-only", "tests"], ["tests/statistics", "tests/docs/test_readme.py", "-m", "not slow"]):
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=unpacked,
            env={**environment, "PYTHONPATH": str(unpacked)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-2000:]


def test_the_citation_the_changelog_and_the_dockerfile_go_with_the_project() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    version = PROJECT["project"]["version"]
    assert f"\nversion: {version}\n" in citation
    assert f"\nlicense: {PROJECT['project']['license']}\n" in citation
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE) for name in line.split()[:-1]}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert {*PACKAGES, "requirements", "pyproject.toml"} <= copied


def test_every_console_script_leads_to_something_that_can_be_called() -> None:
    scripts = PROJECT["project"]["scripts"]
    assert "marft-bridge" in scripts
    for target in scripts.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


# Written in halves, so that this file does not contain what it looks for.
MACHINE_PATHS = re.compile(
    r"(?<![\w.~-])/(?:ro" r"ot|wo" r"rk|tm" r"p|ho" r"me/\w+|opt/py" r"pi|opt/wh" r"eels)(?![\w-])"
)
REGISTRY_HOSTS = re.compile(
    r"(?:py"
    r"pi\.org|python"
    r"hosted\.org|npm"
    r"js\.org|proxy\.go"
    r"lang\.org|deb\.deb"
    r"ian\.org|crates"
    r"\.io)"
    r"|ind"
    r"ex-url[ =]\w+://(?!download\.pytorch\.org/whl/cpu\b)"
)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("see /ro" + "ot/.cache", MACHINE_PATHS),
        ("open('/tm" + "p/x')", MACHINE_PATHS),
        ("/ho" + "me/ada/models", MACHINE_PATHS),
        ("--extra-ind" + "ex-url https://mirror.example/simple", REGISTRY_HOSTS),
        ("https://py" + "pi.org/simple", REGISTRY_HOSTS),
    ],
)
def test_the_patterns_find_what_must_not_be_tracked(line: str, pattern: re.Pattern[str]) -> None:
    assert pattern.search(line)


@pytest.mark.parametrize(
    "line", ["--extra-ind" + "ex-url https://download.pytorch.org/whl/cpu", "a/tm" + "p/b", "/workers"]
)
def test_the_patterns_leave_what_may_be_tracked(line: str) -> None:
    assert not MACHINE_PATHS.search(line)
    assert not REGISTRY_HOSTS.search(line)


def test_no_tracked_file_names_a_machine_path_or_a_registry() -> None:
    wrong = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for pattern in (MACHINE_PATHS, REGISTRY_HOSTS):
            for hit in pattern.finditer(text):
                line = text.count("\n", 0, hit.start()) + 1
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {hit.group()}")
    assert not wrong
