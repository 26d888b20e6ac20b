"""A run folder -> what its live proxy says of itself, as lines for `marft-bridge status`.

Invariant: a proxy that does not answer is none; nothing here waits for long.
"""

from __future__ import annotations

from typing import Any

import httpx

from marft_bridge.live.split import BASE, CANDIDATE, LiveFile, read_live_file
from marft_bridge.run_folder import RunFolder


def live_lines(folder: RunFolder) -> list[str]:
    """What a proxy of this folder says of itself, for `status`; no line where none runs."""
    found = read_live_file(folder.live)
    told = _asked(found) if found is not None and found.base_url is not None else None
    if found is None or told is None:
        return []
    lines = [f"live traffic at {found.base_url}: split {told['split'][BASE]:g}/{told['split'][CANDIDATE]:g}"]
    for name, counts in told["variants"].items():
        latency = counts["latency_ms"]
        shown = f", {latency['p50']:.0f} ms in the middle, 95 % within {latency['p95']:.0f} ms" if latency else ""
        left = f", {counts['left']} clients left" if counts["left"] else ""
        lines.append(f"  {name}: {counts['requests']} requests, {counts['errors']} errors{left}{shown}")
    others = {
        "requests without a key, answered by base": told["without_key"],
        "requests not mirrored": told["mirror_dropped"],
        "calls not recorded": told["not_recorded"]["calls"],
        "spans not recorded": told["not_recorded"]["spans"],
        **{f"requests refused: {code}": count for code, count in told["refused"].items()},
    }
    return lines + [f"  {count} {what}" for what, count in others.items() if count]


def _asked(file: LiveFile) -> dict[str, Any] | None:
    address = (file.base_url or "").removesuffix("/v1")
    try:
        answer = httpx.get(
            f"{address}/marft/live",
            headers={"Authorization": f"Bearer {file.api_key}"},
            timeout=5.0,
            trust_env=False,
        )
        told: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    return told if answer.status_code == 200 else None
