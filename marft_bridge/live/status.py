"""A run folder -> the state of its live proxy, as lines for `marft-bridge status`.

Invariant: a proxy that does not answer within seconds counts as not running; the key is sent to one that runs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from marft_bridge.live.split import BASE, CANDIDATE, LiveFile, read_running_file
from marft_bridge.runs.run_folder import RunFolder
from trace_store.json_text import read_json


def read_live_lines(folder: RunFolder) -> list[str]:
    """The state of the proxy of this folder; no line where none runs. Raises as `read_running_file`."""
    live_file = read_running_file(folder.live)
    report = _fetch_report(live_file) if live_file is not None and live_file.base_url is not None else None
    if live_file is None or report is None:
        return []
    lines = [f"live traffic at {live_file.base_url}: split {report['split'][BASE]:g}/{report['split'][CANDIDATE]:g}"]
    for name, counts in report["variants"].items():
        latency = counts["latency_ms"]
        latency_text = (
            f", {latency['p50']:.0f} ms in the middle, 95 % within {latency['p95']:.0f} ms" if latency else ""
        )
        left_text = f", {counts['left']} clients left" if counts["left"] else ""
        lines.append(f"  {name}: {counts['requests']} requests, {counts['errors']} errors{left_text}{latency_text}")
        if counts["fallbacks"]:
            share_text, reasons_text = _reasons_to_texts(counts["fallbacks"], counts["requests"])
            lines.append(f"    {share_text} fell back to a hosted model: {reasons_text}")
        if counts["unjudged"]:
            share_text, reasons_text = _reasons_to_texts(counts["unjudged"], counts["requests"])
            lines.append(f"    {share_text} had no score of the judge: {reasons_text}")
    other_counts = {
        "requests without a key, answered by base": report["without_key"],
        "requests not mirrored": report["mirror_dropped"],
        "calls not recorded": report["not_recorded"]["calls"],
        "spans not recorded": report["not_recorded"]["spans"],
        **{f"requests refused: {code}": count for code, count in report["refused"].items()},
    }
    return lines + [f"  {count} {label}" for label, count in other_counts.items() if count]


def _reasons_to_texts(counts: Mapping[str, int], requests: int) -> tuple[str, str]:
    """The share of the requests, and the counts by reason."""
    reasons_text = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values()) / requests:.1%}", reasons_text


def _fetch_report(live_file: LiveFile) -> dict[str, Any] | None:
    address = (live_file.base_url or "").removesuffix("/v1")
    try:
        answer = httpx.get(
            f"{address}/marft/live",
            headers={"Authorization": f"Bearer {live_file.api_key}"},
            timeout=5.0,
            trust_env=False,
        )
        report: dict[str, Any] = read_json(answer.content)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    return report if answer.status_code == 200 else None
