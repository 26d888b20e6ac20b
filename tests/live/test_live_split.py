"""Owns: who gets which team, before any request is sent.

- A key has one team for ever; shares of keys are as asked, within binomial bounds; a share that moves moves only the
  keys that it must; the salt decides, is made once and kept for its owner only.
- Where a key comes from, in order; what is no key.
- What --split, --base and --candidate may say, and what is refused before anything starts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lora_files import write_adapter

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.live.flags import flags_to_live
from marft_bridge.live.identity import request_to_identity
from marft_bridge.live.split import (
    BASE,
    CANDIDATE,
    Split,
    key_to_position,
    key_to_variant,
    read_live_file,
    read_or_make_live_file,
    text_to_split,
)
from marft_bridge.live.teams import text_to_versions, versions_to_team
from marft_bridge.promotion.manifest import Manifest, PromotedAdapter
from marft_bridge.serving.adapter_registry import AdapterRegistry

KEYS = [f"user-{number}" for number in range(5_000)]
SALT = b"salt"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("share", [1, 10, 50, 90, 99.5])
def test_a_share_of_keys_is_as_asked_within_binomial_bounds(share: float) -> None:
    split = Split(100 - share, share)
    found = sum(key_to_variant(SALT, key, split) == CANDIDATE for key in KEYS)
    expected, deviation = len(KEYS) * share / 100, math.sqrt(len(KEYS) * share / 100 * (1 - share / 100))
    assert abs(found - expected) < 4 * deviation  # one in 16,000 by chance, and the keys do not change


def test_places_are_uniform() -> None:
    places = sorted(key_to_position(SALT, key) for key in KEYS)
    # Kolmogorov-Smirnov: 1.63 is the bound at one in a hundred.
    worst = max(abs(place - (rank + 0.5) / len(places)) for rank, place in enumerate(places))
    assert worst * math.sqrt(len(places)) < 1.63
    assert places[0] >= 0
    assert places[-1] < 1


def test_a_place_is_the_keyed_hash_that_the_docs_name() -> None:
    digest = hashlib.blake2b(b"ada", key=SALT, digest_size=8).digest()
    assert key_to_position(SALT, "ada") == pytest.approx(int.from_bytes(digest, "big") / 2**64, abs=1e-15)


@given(st.text(), st.integers(0, 1000), st.integers(0, 1000))
def test_raising_the_candidates_share_takes_no_key_from_it(key: str, one: int, other: int) -> None:
    small, large = (Split(100 - share / 10, share / 10) for share in sorted((one, other)))
    if key_to_variant(SALT, key, small) == CANDIDATE:
        assert key_to_variant(SALT, key, large) == CANDIDATE


def test_from_90_10_to_80_20_a_tenth_of_the_keys_moves_all_in_one_direction() -> None:
    before = {key: key_to_variant(SALT, key, Split(90, 10)) for key in KEYS}
    after = {key: key_to_variant(SALT, key, Split(80, 20)) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {(before[key], after[key]) for key in moved} == {(BASE, CANDIDATE)}
    assert abs(len(moved) - 500) < 4 * math.sqrt(5_000 * 0.1 * 0.9)


def test_all_and_nothing_are_shares_too() -> None:
    assert {key_to_variant(SALT, key, Split(100, 0)) for key in KEYS} == {BASE}
    assert {key_to_variant(SALT, key, Split(0, 100)) for key in KEYS} == {CANDIDATE}


def test_another_salt_assigns_anew() -> None:
    same = sum(abs(key_to_position(SALT, key) - key_to_position(b"other", key)) < 0.01 for key in KEYS)
    assert same < 200  # 2 % would by chance


def test_salt_and_key_are_made_once_and_are_their_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    assert read_live_file(path) is None
    first = read_or_make_live_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(first.salt) == 32
    with first.announced("http://127.0.0.1:1/v1"):
        again = read_or_make_live_file(path)
        assert (again.salt, again.api_key, again.base_url) == (first.salt, first.api_key, "http://127.0.0.1:1/v1")
        assert path.stat().st_mode & 0o777 == 0o600
    assert read_or_make_live_file(path) == first
    with again.announced("http://127.0.0.1:2/v1"):  # of a proxy that was killed
        pass
    assert read_or_make_live_file(path) == first
    assert first.api_key not in repr(first)
    other = read_or_make_live_file(tmp_path / "other.json")
    assert other.salt != first.salt
    assert other.api_key != first.api_key


def test_a_damaged_file_is_said_and_no_salt_is_made_up(tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    for text in ("{", "[]", json.dumps({"salt": "xyz", "api_key": "k", "base_url": None})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"live\.json is unreadable"):
            read_or_make_live_file(path)
        assert path.read_text() == text


# Keys


def test_a_key_comes_from_the_first_place_that_has_one() -> None:
    headers = {"x-marft-session": "s", "x-marft-run": "r", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    body = {"user": "u", "safety_identifier": "i", "metadata": {"session_id": "m"}}
    order = [("x-marft-session", "s"), ("user", "u"), ("safety_identifier", "i"), ("metadata.session_id", "m")]
    order += [("x-marft-run", "r"), ("traceparent", TRACE), ("", None)]
    for source, key in order:
        identity = request_to_identity(headers, body)
        assert (identity.key_source, identity.key) == (source, key)
        headers.pop(source, None)
        body.pop(source.partition(".")[0], None)


def test_a_run_is_named_by_its_header_or_else_by_its_trace() -> None:
    traced = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    assert request_to_identity({"x-marft-session": "s"}, {}).run_key is None
    assert request_to_identity(traced, {"user": "u"}).run_key == TRACE
    assert request_to_identity({**traced, "x-marft-run": "r"}, {}).run_key == "r"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-b7ad6b7169203331-01",
    ],
)
def test_what_is_no_traceparent_is_no_key(header: str) -> None:
    identity = request_to_identity({"traceparent": header}, {})
    assert (identity.key, identity.run_key, identity.key_source) == (None, None, "")


@pytest.mark.parametrize("value", [7, "", None, ["u"], {"id": "u"}])
def test_what_is_no_text_is_no_key(value: object) -> None:
    assert request_to_identity({}, {"user": value, "metadata": value}).key is None


def test_a_person_is_who_the_app_names_and_a_session_is_no_person() -> None:
    identity = request_to_identity({"x-marft-session": "s"}, {"safety_identifier": "i"})
    assert (identity.subject, identity.session) == ("i", "s")
    assert request_to_identity({"x-marft-session": "s"}, {}).subject is None


# Flags


def test_a_split_is_two_shares_of_a_hundred() -> None:
    assert text_to_split("90/10") == Split(90, 10)
    assert text_to_split(" 99.5/0.5 ") == Split(99.5, 0.5)
    assert str(text_to_split("100/0")) == "100/0"
    for wrong in ("90", "90/20", "90/10/0", "-10/110", "a/b", "", "nan/nan"):
        with pytest.raises(ConfigError, match="shares of base and candidate"):
            text_to_split(wrong)


def test_flags_that_would_have_no_effect_are_refused() -> None:
    assert flags_to_live(None, None, None, False, None, None, None) is None
    with pytest.raises(ConfigError, match=r"--base, --port without --split or --mirror"):
        flags_to_live(None, "1", None, False, 8000, None, None)
    mirrored = flags_to_live(None, None, None, True, None, None, None)
    assert mirrored is not None
    assert (mirrored.split, mirrored.candidate, mirrored.port) == (Split(100, 0), "best", 8100)


@pytest.fixture
def registry(tmp_path: Path) -> AdapterRegistry:
    found = AdapterRegistry(tmp_path / "adapters", "b" * 64)
    for node, versions in {"planner": (0, 1, 2), "team/writer": (0, 1)}.items():
        for version in versions:
            write_adapter(found.new_folder(node, version), {"layers.0.self_attn.q_proj": (6, 4)})
            found.register(node, version, None, {})
    return found


NODES = ("planner", "team/writer")


def nothing() -> None:
    return None


def promotion(registry: AdapterRegistry, versions: Mapping[str, int], **changes: str) -> Manifest:
    """A promotion of these versions as they are registered; `changes` are fields of each adapter."""
    rows = [registry.get(node, version) for node, version in versions.items()]
    fields = [{"version": row.version, "sha256": row.sha256, **changes} for row in rows]
    adapters = {row.node: PromotedAdapter.model_validate(field) for row, field in zip(rows, fields, strict=True)}
    return Manifest.model_construct(number=7, base_sha256="b" * 64, adapters=adapters)


@pytest.mark.parametrize(
    ("text", "promoted", "expected"),
    [
        ("1", None, {"planner": 1, "team/writer": 1}),
        ("newest", None, {"planner": 2, "team/writer": 1}),
        ("planner=2, team/writer=0", None, {"planner": 2, "team/writer": 0}),
        ("promoted", {"planner": 1, "team/writer": 0}, {"planner": 1, "team/writer": 0}),
        ("planner=newest,team/writer=promoted", {"team/writer": 0}, {"planner": 2, "team/writer": 0}),
    ],
)
def test_a_team_is_a_number_a_word_or_a_version_of_each_node(
    text: str, promoted: dict[str, int] | None, expected: dict[str, int], registry: AdapterRegistry
) -> None:
    newest = None if promoted is None else promotion(registry, promoted)
    assert text_to_versions("--base", text, NODES, registry, lambda: newest) == expected


@pytest.mark.parametrize("changes", [{"sha256": "a" * 64}, {"base_sha256": "a" * 64}])
def test_a_promoted_version_with_other_weights_than_were_signed_off_is_refused(
    changes: dict[str, str], registry: AdapterRegistry
) -> None:
    newest = promotion(registry, {"planner": 1, "team/writer": 1}, **changes)
    with pytest.raises(ServingError, match="adapter v1 of node 'planner' is not the one that promotion 7 signed off"):
        text_to_versions("--base", "promoted", NODES, registry, lambda: newest)
    assert text_to_versions("--base", "1", NODES, registry, lambda: newest)  # by its number it is what it is


@pytest.mark.parametrize("record_says", ["another", "nothing"])
def test_a_promoted_version_with_another_scale_than_was_signed_off_is_refused_whatever_its_record_says(
    record_says: str, registry: AdapterRegistry
) -> None:
    folder = Path(registry.get("planner", 1).path)
    config, record = folder / "adapter_config.json", folder / "marft.json"
    signed = hashlib.sha256(config.read_bytes()).hexdigest()
    newest = promotion(registry, {"planner": 1}, config_sha256=signed)
    assert text_to_versions("--base", "planner=promoted,team/writer=0", NODES, registry, lambda: newest)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 3200}))
    digest = hashlib.sha256(config.read_bytes()).hexdigest() if record_says == "another" else None
    record.write_text(json.dumps(json.loads(record.read_text()) | {"config_sha256": digest}))
    with pytest.raises(ServingError, match=r"is not the one that promotion 7 signed off: .* another adapter_config"):
        text_to_versions("--base", "planner=promoted,team/writer=0", NODES, registry, lambda: newest)


@pytest.mark.parametrize(
    ("text", "named", "expected"),
    [
        ("best", 1, {"planner": 1, "team/writer": 1}),
        ("best", None, {"planner": 2, "team/writer": 1}),  # training named none
        ("planner=best,team/writer=0", 1, {"planner": 1, "team/writer": 0}),
        ("newest", 1, {"planner": 2, "team/writer": 1}),
    ],
)
def test_the_best_is_what_training_names(
    text: str, named: int | None, expected: dict[str, int], registry: AdapterRegistry
) -> None:
    versions = text_to_versions(
        "--candidate", text, NODES, registry=registry, read_promoted=nothing, named_version=named
    )
    assert versions == expected


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("2", ServingError, "node 'team/writer' has no adapter v2; published: v0, v1"),
        ("latest", ConfigError, "'latest' is no version"),
        ("-1", ConfigError, "'-1' is no version"),
        ("planner=1", ConfigError, r"name each of planner, team/writer once \(wrong or missing: team/writer\)"),
        ("planner=1,team/writer=1,x=1", ConfigError, "wrong or missing: x"),
        ("planner=0,planner=1,team/writer=1", ConfigError, "names planner more than once; give each node one version"),
        ("planner=1, planner = 1,team/writer=1", ConfigError, "names planner more than once"),
        ("planner=", ConfigError, "'planner=' is not node=version"),
        ("promoted", ConfigError, "nothing was promoted"),
    ],
)
def test_what_is_no_team_is_refused(text: str, kind: type[Exception], message: str, registry: AdapterRegistry) -> None:
    with pytest.raises(kind, match=message):
        text_to_versions("--candidate", text, NODES, registry, nothing)


def test_frozen_nodes_run_version_0_in_every_team() -> None:
    team = versions_to_team(BASE, {"planner": 3}, ("team/judge",))
    assert team.versions == {"planner": 3, "team/judge": 0}
    assert team.served_names == {"planner": "planner@3", "team/judge": "team.2Fjudge@0"}
