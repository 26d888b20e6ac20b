"""The pins of cpu.txt and the hashes of cpu.lock -> a software bill of materials: CycloneDX 1.6 as JSON, on stdout.

Invariant: the same pins give the same bytes; there is no time and no random number in it. It uses the standard library
only, so that it can be run on a bare checkout.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def lock_to_hashes(lock: str) -> dict[str, list[str]]:
    """`name==version` -> the SHA-256 of each of its files."""
    hashes: dict[str, list[str]] = {}
    pin = ""
    for line in lock.splitlines():
        if match := _PIN.match(line):
            pin = f"{match[1]}=={match[2]}"
        if line.startswith(("#", " ")) and (of_file := _HASH.search(line)):
            hashes.setdefault(pin, []).append(of_file[1])
    return hashes


def pins_to_sbom(pins: str, lock: str, project: dict[str, Any]) -> dict[str, Any]:
    """The document. `project` is the table [project] of pyproject.toml."""
    hashes = lock_to_hashes(lock)
    components = []
    for line in pins.splitlines():
        if match := _PIN.match(line):
            name, version = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]
            component: dict[str, Any] = {"type": "library", "name": name, "version": version}
            component["purl"] = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
            component["bom-ref"] = component["purl"]
            of_files = hashes.get(f"{name}=={version}", [])
            if of_files:
                component["hashes"] = [{"alg": "SHA-256", "content": of_file} for of_file in of_files]
            components.append(component)
    own = {"type": "application", "name": project["name"], "version": project["version"], "bom-ref": project["name"]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
    }


def main() -> int:
    """Prints the document."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins, lock = ((ROOT / "requirements" / name).read_text() for name in ("cpu.txt", "cpu.lock"))
    json.dump(pins_to_sbom(pins, lock, project), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
