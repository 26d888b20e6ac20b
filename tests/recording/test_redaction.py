"""Owns: what a redaction takes out of a text or a span, and what it must leave.

- Each built-in pattern finds the shapes that it is named after and leaves what only looks like them; the quick search
  that comes first never hides a match; a megabyte made to be slow is not.
- Text is seen behind its JSON quoting, keys and numbers included, and comes back as JSON.
- Ids, edges and numbers of a span stay; unknown attributes are content; token ids go with the text that they decode to.
- A user's function sees every text; when it fails, the content is dropped and the failure counted.
- Of how a run was started, nothing whose name is that of a secret is recorded, however deep it lies.
- Without content capture only structure and numbers are left.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from marft_bridge.common.library_internals import CONFIG_KEY_RUNTIME
from marft_bridge.common.redaction_patterns import GROUPS, NAMES, PATTERNS, Prefilter, is_card, names_to_patterns
from marft_bridge.config.record import RecordOptions
from marft_bridge.recording.redaction import FUNCTION, Redactor
from marft_bridge.recording.run_facts import loop_to_run_config
from marft_bridge.recording.span_privacy import SpanPrivacy
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as c
from trace_store.attribute_kinds import KINDS, Kind, key_to_kind
from trace_store.records import SpanRow
from trace_store.store import TraceStore

EVERYTHING = Redactor(GROUPS)
HEX32 = "0123456789abcdef" * 2
# The header and payload of a token are JSON objects in base64: both begin with {" and so with eyJ.
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow+IBAAKCAQEA/x==\n-----END RSA PRIVATE KEY-----"


def clean(text: str, redactor: Redactor = EVERYTHING) -> str:
    cleaned = redactor.value_to_clean("k", text, Counter())
    assert isinstance(cleaned, str)
    return cleaned


FOUND = [
    ("openai_key", "sk-" + "Ab1" * 16, "{}"),
    ("openai_key", "sk-proj-" + "Ab-1_" * 12, "{}"),
    ("anthropic_key", "sk-ant-api03-" + "Ab-1_" * 12, "{}"),
    ("aws_key", "AKIA" + "IOSFODNN7EXAMPLE", "{}"),
    ("github_token", "ghp_" + "a1B2" * 9, "{}"),
    ("github_token", "github_pat_" + "a1B2" * 6 + "_" + "c3" * 20, "{}"),
    ("google_key", "AIza" + "Sy-_1" * 7, "{}"),
    ("google_key", "ya29." + "a0Af-" * 10, "{}"),
    ("slack_token", "xoxb-" + "123456789012-" + "a1B2" * 6, "{}"),
    ("slack_token", "hooks.slack.com/services/" + "T0/B0/" + "a1B2" * 6, "https://{}"),
    ("hugging_face_token", "hf_" + "aB" * 17, "{}"),
    ("langsmith_key", "lsv2_pt_" + HEX32 + "_" + "0123456789", "{}"),
    ("stripe_key", "sk_live_" + "a1B2" * 6, "{}"),
    ("jwt", JWT, "{}"),
    ("private_key", PEM, "{}"),
    ("private_key", PEM[:50], "{}"),  # cut off: the rest may be anywhere behind
    ("bearer_token", "a1b2c3d4e5f6", "Bearer {}"),
    ("bearer_token", "abcd" * 8, "bearer  {}"),
    ("secret_field", "Basic dXNlcjpwYXNz", "Authorization: {}"),
    ("secret_field", "abc12345678", "x-api-key: {}"),
    ("secret_field", "abc12345678", "OPENAI_API_KEY={}"),
    ("secret_field", "hunter2hunter2", "{{'password': '{}'}}"),
    ("secret_field", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "aws_secret_access_key = {}"),
    ("url_password", "p:a@ss", "postgres://user:{}@db.example:5432/x"),
    ("url_password", "secret", "redis://:{}@cache"),
    ("email", "ada.lovelace+notes@mail.example.org", "{}"),
    ("email", "jörg@bücher.example", "<{}>"),
    ("card", "4111111111111111", "{}"),
    ("card", "4111 1111 1111 1111", "{} 123"),
    ("card", "4111-1111-1111-1111", "12 {}"),
    ("card", "4111 1111 1111 1111", "5555 {}"),
    ("card", "378282246310005", "{}"),
    ("card", "3782 822463 10005", "{}"),
    ("card", "4222222222222", "{}"),
    ("card", "6304000000000000000", "{}"),
]

LEFT = [
    "sk-learn-is-a-great-library-for-beginners",
    "risk-" + "a" * 40,
    "desk-assistant",
    "AKIA" + "TOOSHORT",
    "AKIA" + "IOSFODNN7EXAMPLETOOLONG",
    "ghp_short and github_pat_",
    "AIza is a prefix",
    "xoxo-hugs",
    "hf_hub_download(repo_id) and shf_" + "a" * 40,
    "ls__not_hex",
    "eyJust.a.sentence and eyJhbGciOiJIUzI1NiJ9 alone",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    "the bearer of good news, bearer internationalization",
    "Authorization: required",
    "the password is checked; password: see-the-manual",
    "max_tokens=1024 api_keys are rotated",
    "http://host:8080/path and http://[::1]:80/x and see https://example.org/@user",
    "http://host:8080 or a@b",
    "a @decorator, 1.2@3.4, user@localhost, git@github.com:org/repo",
    "4111 1111 1111 1112",  # its Luhn sum is 31
    "1234567890123456789 1732000000000000000",
    "2019 2020 2021 2022",
    "3.1415926535897932",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "plain words",
    "",
]


@pytest.mark.parametrize(("name", "secret", "around"), FOUND, ids=lambda value: str(value)[:30])
def test_each_pattern_takes_out_what_it_is_named_after_and_nothing_around_it(
    name: str, secret: str, around: str
) -> None:
    found: Counter[str] = Counter()
    text = f"before, {around.format(secret)} after"
    cleaned = EVERYTHING.value_to_clean("k", text, found)
    replaced = name != "private_key" or secret == PEM  # a key without an end takes the rest of the text with it
    assert cleaned == (text.replace(secret, f"[redacted:{name}]") if replaced else "before, [redacted:private_key]")
    assert found == {name: 1}
    assert clean(cleaned) == cleaned  # what was redacted is not redacted again


@pytest.mark.parametrize("text", LEFT, ids=lambda text: text[:30])
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert clean(text) == text


def test_every_pattern_has_an_example_and_can_be_chosen_by_its_name() -> None:
    assert {name for name, _, _ in FOUND} == set(NAMES)
    for name, secret, around in FOUND:
        assert f"[redacted:{name}]" in clean(around.format(secret), Redactor([name]))
        others = Redactor([other for other in NAMES if other != name])
        assert f"[redacted:{name}]" not in clean(around.format(secret), others)
    with pytest.raises(ValueError, match="no pattern is called 'e-mail'; known: secrets, personal, private_key"):
        names_to_patterns(["secrets", "e-mail"])


def test_secrets_and_personal_data_are_groups() -> None:
    assert {pattern.name for pattern in names_to_patterns(["personal"])} == {"email", "card"}
    assert clean("Bearer a1b2c3d4e5", Redactor(["personal"])) == "Bearer a1b2c3d4e5"
    assert clean("a@b.example", Redactor(["secrets"])) == "a@b.example"


def test_the_quick_search_never_hides_a_match() -> None:
    draw = random.Random(0)
    for pattern in PATTERNS:
        examples = [around.format(secret) for name, secret, around in FOUND if name == pattern.name]
        for _ in range(50):
            words = ["".join(draw.choices('aZ9_-@:/. \\é"', k=draw.randint(0, 20))) for _ in range(2)]
            text = f"{words[0]} {draw.choice(examples)} {words[1]}"
            if pattern.expression.search(text) is not None:
                assert Prefilter([pattern]).may_be_in(text)
                assert Prefilter(PATTERNS).may_be_in(text)


@pytest.mark.parametrize(
    ("digits", "valid"),
    [
        ("4111111111111111", True),  # 8 + 7 * 2 doubled and 8 single: 30
        ("4111111111111112", False),
        ("378282246310005", True),
        ("5105105105105100", True),
        ("0000000000000000", False),  # a sum of 0, but no card starts like this
        ("411111111111", False),
    ],
)
def test_a_card_number_has_a_card_s_start_length_and_luhn_sum(digits: str, valid: bool) -> None:
    assert is_card(digits) is valid


MEGABYTE = 1 << 20
SLOW = ["sk-", "sk-ant-", "eyJ", "eyJa.", "eyJaaaaaaaa.eyJ", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "bearer "]
SLOW += ["authorization:", "password='", "://a:", "://", "a@", "@a.", "a.", "a", "é", "4111 ", "4111-1111-1111-", "4"]
SLOW += [
    "1234567890123",
    "bearer aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ",
    "://a:aaaaaaaaaaaaaaaa",
    '"',
    "\\",
    "[",
    "{",
    '{"a":',
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("unit", SLOW)
def test_a_megabyte_that_is_made_to_be_slow_is_not(unit: str) -> None:
    # A pattern in quadratic time would take hours; what is here takes about a second.
    text = "sk-@bearer authorization eyJ PRIVATE KEY secret passw 1234567890123 " + unit * (
        MEGABYTE // len(unit.encode())
    )
    for pattern in PATTERNS:
        pattern.text_to_clean(text)
    Prefilter(PATTERNS).may_be_in(text)


KEY = "sk-" + "Ab1" * 16


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: json.dumps([{"role": "user", "content": text}]),
        lambda text: json.dumps({"a": [{"b": {"c": text}}]}, indent=2),
        lambda text: json.dumps({text: 1}),
        lambda text: json.dumps([{"arguments": json.dumps({"inner": json.dumps([text])})}]),
        lambda text: json.dumps({"x": text}).replace("s", "\\u0073"),
        lambda text: str({"x": text}),
        lambda text: repr(text),
        lambda text: json.dumps([text])[:-1],  # cut off, so not JSON
    ],
    ids=["message", "deep", "key", "nested", "escaped", "dict", "repr", "torn"],
)
def test_a_secret_is_found_behind_any_quoting(encode: Callable[[str], str]) -> None:
    cleaned = clean(encode(f"line one\n{KEY}\ttail"))
    assert "Ab1Ab1" not in cleaned
    assert "[redacted:openai_key]" in cleaned
    assert "tail" in cleaned


def test_what_comes_back_is_json_again_with_only_the_secret_gone() -> None:
    value = {"né": [1, 2.5, None, True, f"x {KEY}"], "card": 4111111111111111, "big": 1732000000000000000}
    assert json.loads(clean(json.dumps(value))) == {
        "né": [1, 2.5, None, True, "x [redacted:openai_key]"],
        "card": "[redacted:card]",
        "big": 1732000000000000000,
    }
    untouched = json.dumps({"b": "x@y", "a": [1.0, float("nan")]}, indent=1)
    assert clean(untouched) == untouched


def test_messages_that_come_again_in_later_prompts_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    search = Prefilter.may_be_in
    monkeypatch.setattr(Prefilter, "may_be_in", lambda self, text: searched.append(text) or search(self, text))
    suspect = {"id": "00000000-0000-4000-8000-000000000000", "content": "no card at all"}  # has digits as a card has
    messages = [suspect | {"turn": f"turn {turn}"} for turn in range(400)]
    redactor = Redactor(GROUPS)
    for turn in range(1, 401):
        prompt = json.dumps(messages[:turn])
        assert clean(prompt, redactor) == prompt
    assert len(searched) < 400 * 50  # some for each new message, and not for those before it


def test_a_secret_is_found_among_messages_that_were_searched_before() -> None:
    key = "sk-" + "Ab1" * 16
    harmless = {"content": "4000 0000 0000 0000, no card", "kwargs": {"n": [1, "two"]}}
    secret = {"content": f"use {key}", "password": "hunter2"}
    redactor = Redactor(GROUPS)
    for messages in (
        [harmless],
        [harmless, secret],
        [secret],
        [secret, harmless, secret],
        [harmless, 4111111111111111],
    ):
        for text in (json.dumps(messages), json.dumps(messages, indent=1), json.dumps({"messages": messages})):
            assert clean(text, redactor) == clean(text, Redactor(GROUPS))
            assert key not in clean(text, redactor)
            assert "hunter2" not in clean(text, redactor)
            assert "4111111111111111" not in clean(text, redactor)


@pytest.mark.parametrize("text", ["[{}", "[{}]x", "[{},]", '[{"a": 1} {"b": 2}]', "[{]", "[{} , {}]", "[{}, [1], 2]"])
def test_a_list_that_is_none_is_searched_as_text(text: str) -> None:
    key = "sk-" + "Ab1" * 16
    for suspect in (f"{text} {key}", text.replace("{}", json.dumps({"k": key}))):
        assert key not in clean(suspect)


def test_a_field_that_is_named_like_a_secret_is_one_whatever_its_value() -> None:
    cleaned = json.loads(
        clean(json.dumps({"headers": {"Authorization": "Basic x"}, "password": "tiger", "n": "tiger"}))
    )
    assert cleaned == {
        "headers": {"Authorization": "[redacted:secret_field]"},
        "password": "[redacted:secret_field]",
        "n": "tiger",
    }
    schema = json.dumps({"properties": {"password": {"type": "string"}}})
    assert clean(schema) == schema


# -- spans ----------------------------------------------------------------------------------------------------

MESSAGES = json.dumps([{"role": "user", "content": f"my key is {KEY}"}])
TOKENS: dict[str, Any] = {c.PROMPT_IDS: [1, 2, 3], c.SAMPLED_IDS: [4, 5], c.LOGPROBS: [-0.1, -0.2]}


def span(operation: str = c.CHAT, status: str | None = None, **attributes: Any) -> SpanRow:
    structure = {c.OPERATION: operation, c.NODE: "n", c.CHECKPOINT_NS: "n:1", c.TRIGGERED_BY: ["m:0"], c.STEP: 3}
    return SpanRow(
        trace_id="ab" * 16,
        span_id="cd" * 8,
        parent_span_id=None,
        name=f"{operation} n",
        operation=operation,
        start_ns=1,
        end_ns=2,
        status="error" if status else "ok",
        status_message=status,
        convention=c.CONVENTION_VERSION,
        attributes=structure | attributes,
    )


def test_every_attribute_name_of_the_conventions_is_decided_and_an_unknown_one_is_content() -> None:
    operations = {c.INVOKE_WORKFLOW, c.INVOKE_AGENT, c.CHAT, c.EXECUTE_TOOL}
    public = {name: value for name, value in vars(c).items() if name.isupper() and not name.startswith("_")}
    versions = {c.CONVENTION_VERSION, c.FORMER_VERSIONS, c.SCHEMA_URL, c.RESOURCE_SCHEMA_URL}
    assert set(public.values()) - operations - versions == set(KINDS)
    assert key_to_kind("somebody.elses.key") is Kind.CONTENT


def test_a_span_without_secrets_is_written_as_it_is() -> None:
    row = span(**TOKENS, **{c.INPUT_MESSAGES: "[]", c.OUTPUT_MESSAGES: '[{"content": "42"}]'})
    privacy = SpanPrivacy(Redactor(GROUPS, lambda _key, text: text))
    assert privacy.row_to_clean(row) == row
    assert (privacy.redactions, privacy.failures) == (Counter(), 0)


@pytest.mark.parametrize("key", [c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, "gen_ai.tool.definitions"])
def test_an_action_whose_text_was_redacted_loses_its_token_ids_and_says_so(key: str) -> None:
    row = span(**TOKENS, **{key: MESSAGES, c.USAGE_OUTPUT_TOKENS: 2})
    privacy = SpanPrivacy(Redactor(["secrets"]))
    cleaned = privacy.row_to_clean(row).attributes
    assert not cleaned.keys() & TOKENS.keys()
    assert cleaned[c.UNTRAINABLE] == "redacted: openai_key"
    assert "Ab1Ab1" not in json.dumps(cleaned)
    assert (cleaned[c.USAGE_OUTPUT_TOKENS], cleaned[c.NODE], cleaned[c.TRIGGERED_BY]) == (2, "n", ["m:0"])
    assert privacy.redactions == {"openai_key": 1}


def test_an_earlier_reason_is_kept_beside_the_redaction() -> None:
    row = span(**{c.INPUT_MESSAGES: MESSAGES, c.UNTRAINABLE: "n=2"})
    assert SpanPrivacy(Redactor(["secrets"])).row_to_clean(row).attributes[c.UNTRAINABLE] == "n=2; redacted: openai_key"


def test_free_text_of_any_span_is_cleaned_and_ids_are_not() -> None:
    ids = {c.TASK_ID: "a@b.example", c.SUBJECT_ID: "a@b.example", c.RUN_ID: "a@b.example"}
    text = {
        c.TASK: json.dumps({"q": "mail a@b.example"}),
        c.TAGS: '{"who": "a@b.example"}',
        c.TOOL_RESULT: "a@b.example",
    }
    odd = {"unknown": ["a@b.example", 3], c.TOOL_NAME: "a@b.example", c.OUTCOME_REASON: "ValueError: a@b.example"}
    row = replace(span(c.INVOKE_WORKFLOW, "ValueError: a@b.example", **ids, **text, **odd), name="run a@b.example")
    cleaned = SpanPrivacy(Redactor(GROUPS)).row_to_clean(row)
    assert {key: cleaned.attributes[key] for key in ids} == ids
    assert cleaned.name == "run [redacted:email]"
    assert cleaned.status_message == "ValueError: [redacted:email]"
    assert cleaned.attributes["unknown"] == ["[redacted:email]", 3]
    rest = json.dumps({key: value for key, value in cleaned.attributes.items() if key not in ids})
    assert "a@b.example" not in rest
    assert c.UNTRAINABLE not in cleaned.attributes  # it was no action


def test_a_user_s_function_sees_each_text_with_its_attribute_after_the_patterns() -> None:
    seen: list[tuple[str, str]] = []

    def function(key: str, text: str) -> str:
        seen.append((key, text))
        return text.replace("Ada", "somebody")

    row = span(**TOKENS, **{c.INPUT_MESSAGES: json.dumps([{"content": f"Ada has\n{KEY}"}]), c.TOOL_RESULT: "no name"})
    privacy = SpanPrivacy(Redactor(["secrets"], function))
    cleaned = privacy.row_to_clean(row).attributes
    assert json.loads(cleaned[c.INPUT_MESSAGES]) == [{"content": "somebody has\n[redacted:openai_key]"}]
    assert (c.INPUT_MESSAGES, "Ada has\n[redacted:openai_key]") in seen
    assert (c.TOOL_RESULT, "no name") in seen
    assert not any(key in (c.NODE, c.CHECKPOINT_NS, c.OPERATION) for key, _ in seen)
    assert cleaned[c.UNTRAINABLE] == "redacted: function, openai_key"
    assert privacy.redactions == {"openai_key": 1, FUNCTION: 1}


def broken(_key: str, _text: str) -> str:
    raise RuntimeError(f"no luck with {KEY}")


@pytest.mark.parametrize(
    ("function", "error"),
    [(broken, "RuntimeError"), (lambda _key, _text: None, "TypeError")],
    ids=["raises", "no text"],
)
def test_what_a_function_could_not_clean_is_dropped_and_counted(
    function: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = span(status=f"ValueError: {KEY}", **TOKENS, **{c.INPUT_MESSAGES: MESSAGES, c.TOOL_NAME: KEY, "unknown": "x"})
    privacy = SpanPrivacy(Redactor((), function))
    cleaned = privacy.row_to_clean(row)
    assert cleaned == replace(
        span(**{c.UNTRAINABLE: f"redaction failed: {error}"}), name=c.CHAT, status="error", status_message="ValueError"
    )
    assert privacy.failures == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"redaction failed with {error}; the content of such spans is dropped"
    ]


def test_without_content_only_structure_numbers_and_names_are_left() -> None:
    kept = {c.REQUEST_MODEL: "m", c.USAGE_OUTPUT_TOKENS: 2, c.REQUEST_TEMPERATURE: 0.5, c.TOOL_NAME: "search"}
    text = {c.INPUT_MESSAGES: "[]", c.OUTPUT_MESSAGES: "[]", c.TOOL_ARGUMENTS: "{}", c.TOOL_RESULT: "r", c.TASK: "{}"}
    row = span(status="ValueError: text", **TOKENS, **kept, **text, **{c.TAGS: "{}", "unknown": 7})
    cleaned = SpanPrivacy(Redactor(()), content=False).row_to_clean(row)
    assert cleaned == replace(
        span(**kept, **{c.UNTRAINABLE: "content is not captured"}), status="error", status_message="ValueError"
    )


@pytest.mark.parametrize(
    ("outcome", "reason", "left"),
    [
        ("failed", "ValueError: text", "ValueError"),
        ("failed", "a text", "error"),
        ("truncated", "by: hand", "content is not captured"),
    ],
)
def test_without_content_a_run_that_failed_says_only_the_type_of_its_error(
    outcome: str, reason: str, left: str
) -> None:
    row = span(c.INVOKE_WORKFLOW, **{c.OUTCOME: outcome, c.OUTCOME_REASON: reason})
    cleaned = SpanPrivacy(Redactor(()), content=False).row_to_clean(row)
    assert cleaned.attributes.get(c.OUTCOME_REASON) == left
    assert c.UNTRAINABLE not in cleaned.attributes


# How a run was started


class Text(TypedDict):
    text: str


@dataclass
class Vault:
    region: str
    db_password: str


@dataclass
class Settings:
    user: str
    auth_token: str
    vault: Vault
    servers: list[dict[str, str]]
    max_tokens: int = 64
    use_auth: bool = True
    author: str = "mary"
    password: int = 0


def test_nothing_of_the_context_or_configurable_that_is_named_like_a_secret_is_recorded(tmp_path: Path) -> None:
    graph: Any = StateGraph(Text, context_schema=Settings)
    graph.add_node("node", lambda state: state)
    graph.add_edge(START, "node")
    recorded = wrap(graph.compile(checkpointer=InMemorySaver()), tmp_path / "store.duckdb", RecordOptions(redact=[]))
    context = Settings(
        "ada", "hidden-1", Vault("north", "hidden-2"), [{"host": "h", "api_key": "hidden-3"}], password=7331
    )
    configurable = {
        "thread_id": "t",
        "credential": "hidden-4",
        "plain": "fine",
        "servers": [{"host": "h", "password": "hidden-5", "deep": {"secret": "hidden-6", "port": 1}}],
    }
    recorded.invoke({"text": "x"}, {"configurable": configurable}, context=context)
    with TraceStore.open(tmp_path / "store.duckdb") as store:
        store.take_in()
        (trajectory,) = store.trajectories()
        (root,) = (span for span in store.spans(trajectory.episode.episode_id) if span.parent_span_id is None)
    assert "hidden" not in str(root.attributes)
    assert "7331" not in root.attributes[c.RUN_CONFIG]
    config = json.loads(root.attributes[c.RUN_CONFIG])
    no_secrets = {"max_tokens": 64, "use_auth": True, "author": "mary"}
    assert config["context"] == {"user": "ada", "vault": {"region": "north"}, "servers": [{"host": "h"}], **no_secrets}
    assert config["configurable"] == {"plain": "fine", "servers": [{"host": "h", "deep": {"port": 1}}]}


def test_a_context_of_secrets_alone_is_still_an_object(tmp_path: Path) -> None:
    loop = SimpleNamespace(
        config={"configurable": {CONFIG_KEY_RUNTIME: SimpleNamespace(context=Vault(None, "hidden"))}},  # type: ignore[arg-type]
        interrupt_before=(),
        interrupt_after=(),
        store=None,
    )
    facts = loop_to_run_config(loop)
    assert facts["context"] == {}
    assert facts["context_forms"] == [([], f"{__name__}.Vault")]
