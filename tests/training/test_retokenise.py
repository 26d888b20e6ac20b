"""Owns: stored calls without token ids become actions to imitate, and nothing else.

- Ids made from the messages of real engine-recorded calls are the engine's ids, prompt for prompt; of answers too where
  the model sampled the tokenizer's own split of its text, and otherwise they are another split of the same text.
- An answer is what the template makes of it, word for word, with the token that ends a turn exactly where the record
  says that the model ended by itself. Whatever does not fit is left as it was, with one of a few reasons.
- Traces of other projects' instrumentors are read in all three conventions, tools included.
- Such actions are taken by filtered imitation where that is asked for, and by nothing else; adapters then move towards
  the answers that earned the reward. Their share is told. The store keeps what it had.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.chat_rig import CHATML, save_chat_model, save_chat_tokenizer
from support.fake_vllm import FakeVllm, running
from support.ingest_rig import foreign_requests, framed, hand_made, openinference, request
from support.sample_spans import SampleTrace
from support.tiny_policy import make_action, make_trajectory
from support.trainer_options import trainer_options

from marft_bridge import cli
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.from_files import ingest_files
from marft_bridge.ingest.recorded_chats import RecordedChat, UnusableChatError, span_to_chat
from marft_bridge.serving.model_config import context_length
from marft_bridge.training.retokenise import STOP_REASONS, ChatTokenizer, Retokeniser
from marft_bridge.training.train import read_metrics, train
from trace_store.assemble import spans_to_trajectory
from trace_store.parquet import store_to_parquet
from trace_store.records import FROM_ENGINE, RETOKENISED, Action, Reward, SpanRow, Trajectory
from trace_store.store import TraceStore
from trainers.batch import Use, trajectories_to_round
from trainers.config import OfflineOptions
from trainers.errors import TrainError
from trainers.marft import MarftTrainer

NODES = ("reasoner", "actor")
QUESTION = "What is two plus two?"
USER = {"role": "user", "content": QUESTION}
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
FOUR = [{"role": "assistant", "content": "four", "tool_calls": []}]
WITH_TOOLS = json.dumps({"tools/reasoner": "a" * 64})
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
ASKED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "two"}}}
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% for t in m.tool_calls or [] %}{{ '[call ' + t.function.name + ' ' + (t.function.arguments | tojson) + ']' }}"
    "{% endfor %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat(answer: str = "four", *prompt: dict[str, Any], **said: Any) -> RecordedChat:
    tools = said.pop("tools", ())
    return RecordedChat(prompt or (USER,), {"role": "assistant", "content": answer, **said}, tools)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer(model)


def decoded(model: Path, ids: Sequence[int]) -> str:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    text: str = tokenizer.decode(list(ids))
    return text


# -- what the engine recorded ------------------------------------------------------------------------------------


def recorded_calls() -> list[dict[str, Any]]:
    """Eight calls of SmolLM2 through the real vLLM: their messages as the recorder wrote them, and the engine's ids."""
    found: list[dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_calls.json").read_text())
    return found


@pytest.mark.slow
def test_ids_made_from_the_messages_of_real_calls_are_those_of_the_engine(smollm2_dir: Path) -> None:
    real, same = ChatTokenizer(smollm2_dir), []
    for call in recorded_calls():
        sample = SampleTrace()
        messages: dict[str, Any] = {"INPUT_MESSAGES": json.dumps(call["input_messages"])}
        sample.call("x", "root", 1, 2, **messages, OUTPUT_MESSAGES=json.dumps(call["output_messages"]))
        ids = real.chat_to_ids(span_to_chat(sample.spans()[0]), ended=call["finish_reason"] in STOP_REASONS)
        assert list(ids.prompt) == call["prompt_ids"]
        assert decoded(smollm2_dir, ids.answer) == decoded(smollm2_dir, call["sampled_ids"])
        same.append(list(ids.answer) == call["sampled_ids"])
    # Of two the model sampled another split of its text than the tokenizer's, "Act" + "or" for "A" + "ctor" say. Their
    # ids are known to be others, which is why no such id is ever given a log-prob.
    assert sorted(same) == [False] * 2 + [True] * 6


# -- one call through a template ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("ended", "end"), [(True, "<|im_end|>"), (False, "")])
def test_a_call_is_the_prompt_as_the_engine_builds_it_and_the_answer_as_the_template_says_it(
    model: Path, tokenizer: ChatTokenizer, ended: bool, end: str
) -> None:
    ids = tokenizer.chat_to_ids(chat("four"), ended=ended)
    assert decoded(model, ids.prompt) == PROMPT
    assert decoded(model, ids.answer) == f"four{end}"


def test_tools_and_their_results_are_rendered(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path, TOOLS)
    before = {"role": "assistant", "content": "", "tool_calls": [ASKED]}
    result = {"role": "tool", "tool_call_id": "1", "content": "four"}
    ids = ChatTokenizer(folder).chat_to_ids(
        chat("", USER, before, result, tool_calls=[ASKED], tools=(ADD,)), ended=True
    )
    said = '<|im_start|>assistant\n[call add {"a": "two"}]<|im_end|>\n'
    assert decoded(folder, ids.prompt) == (
        f"{json.dumps([ADD])}<|im_start|>user\n{QUESTION}<|im_end|>\n{said}"
        "<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decoded(folder, ids.answer) == '[call add {"a": "two"}]<|im_end|>'


REFUSES = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
REWRITES = CHATML.replace("{% for", "{{ messages | length }}{% for", 1)
THINKS = CHATML.replace("m.content", "('<think></think>' if m.role == 'assistant' else '') + m.content")
NO_END = CHATML.replace("<|im_end|>\\n' }}{% endfor", "\\n' }}{% endfor")
NAMES_ONLY = TOOLS.replace("t.function.arguments | tojson", "''")
JOINED = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "call", "reason"),
    [
        (REFUSES, chat("four", {"role": "system", "content": "x"}), "the chat template refuses its messages"),
        (REWRITES, chat(), "the chat template renders the prompt otherwise once it is answered"),
        (THINKS, chat(), "the chat template does not render the answer as it was said"),
        (CHATML, chat("", tool_calls=[{"function": {"name": "add", "arguments": {}}}]), "does not render the answer"),
        (CHATML.replace("+ m.content", "+ (m.content | upper)"), chat(), "does not render the answer as it was said"),
        (NO_END, chat(), "ends the answer with no token at which the model stops"),
        (JOINED, chat("ur", {"role": "user", "content": "fo"}), "prompt and answer share a token"),
        (NAMES_ONLY, chat("", tool_calls=[ASKED]), "does not render the answer as it was said"),
        (CHATML, chat("four<|im_end|>\n<|im_start|>user"), "the answer holds a control token of the base model"),
    ],
)
def test_what_a_template_cannot_say_as_it_was_said_is_refused(
    tmp_path: Path, template: str, call: RecordedChat, reason: str
) -> None:
    with pytest.raises(UnusableChatError, match=reason):
        ChatTokenizer(save_chat_tokenizer(tmp_path, template)).chat_to_ids(call, ended=True)


@pytest.mark.parametrize(
    ("template", "stop", "message"),
    [(None, "<|im_end|>", "has no chat template"), (CHATML, None, "names no token at which an answer ends")],
)
def test_a_model_that_cannot_render_calls_is_refused(
    tmp_path: Path, template: str | None, stop: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTokenizer(save_chat_tokenizer(tmp_path, template, stop))


def test_every_token_at_which_the_engine_stops_ends_an_answer(tmp_path: Path) -> None:
    """Some models name their end of turn in the generation configuration only. The first one ends it."""
    goes_on = CHATML + "{% if not add_generation_prompt %}<|im_start|>{% endif %}"
    folder = save_chat_tokenizer(tmp_path, goes_on, stop=None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    assert decoded(folder, ChatTokenizer(folder).chat_to_ids(chat(), ended=True).answer) == "four<|im_end|>"


def test_an_ending_that_is_no_token_of_its_own_is_refused(tmp_path: Path) -> None:
    """The tokenizer makes one token of "ou", so a model that stops at the token "u" would not have ended "fo" so."""
    folder = save_chat_tokenizer(tmp_path, CHATML.replace("<|im_end|>", "u"), stop=None)
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert "ou" in ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["u"]}))
    with pytest.raises(UnusableChatError, match="ends the answer with no token at which the model stops"):
        ChatTokenizer(folder).chat_to_ids(chat("fo"), ended=True)


def test_white_space_that_the_template_puts_before_an_answer_is_sampled(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path, CHATML.replace("assistant\\n", "assistant").replace("+ '\\n' +", "+ ' ' +"))
    ids = ChatTokenizer(folder).chat_to_ids(chat("four"), ended=True)
    assert decoded(folder, ids.prompt).endswith("<|im_start|>assistant")
    assert decoded(folder, ids.answer) == " four<|im_end|>"


# -- which calls, and how they end -------------------------------------------------------------------------------


def hosted(answers: Sequence[dict[str, Any]], **root: Any) -> list[SpanRow]:
    """A trace of our recorder: one node, `reasoner`, that calls a hosted model; each answer may replace attributes."""
    sample = SampleTrace()
    for number, changed in enumerate(answers):
        begin = 10 + 10 * number
        node = sample.node(f"reasoner:{number}", begin, begin + 9, step=number)
        messages = {"INPUT_MESSAGES": json.dumps([USER]), "OUTPUT_MESSAGES": json.dumps(FOUR)}
        absent: dict[str, Any] = {"PROMPT_IDS": None, "SAMPLED_IDS": None, "LOGPROBS": None, "REQUEST_TEMPERATURE": 0.2}
        sample.call(f"c{number}", node, begin + 1, begin + 8, **messages | absent | changed)
    return sample.spans(**root)


def retokenised(spans: list[SpanRow], tokenizer: ChatTokenizer, **changes: Any) -> tuple[list[Action], Retokeniser]:
    made = Retokeniser(tokenizer, ["reasoner"], **changes)
    found = made.trajectory_to_retokenised(spans_to_trajectory(spans), lambda _: spans)
    return list(found.actions), made


@pytest.mark.parametrize(
    ("changed", "answer", "known"),
    [
        ({}, "four<|im_end|>", True),
        ({"FINISH_REASONS": ["end_turn"]}, "four<|im_end|>", True),
        ({"FINISH_REASONS": ["length"]}, "four", True),
        ({"FINISH_REASONS": None}, "four", False),
        ({"FINISH_REASONS": ["odd"]}, "four", False),
        ({"REQUEST_STOP": ["\n"]}, "four", False),
    ],
)
def test_the_end_of_a_turn_is_there_only_where_the_model_is_known_to_have_ended_it(
    model: Path, tokenizer: ChatTokenizer, changed: dict[str, Any], answer: str, known: bool
) -> None:
    (action,), made = retokenised(hosted([changed]), tokenizer)
    assert decoded(model, action.prompt_ids or ()) == PROMPT
    assert decoded(model, action.sampled_ids or ()) == answer
    assert (action.logprobs, action.temperature, action.trainable) == (None, None, False)
    assert action.untrainable_reason == RETOKENISED
    assert (made.without_ids, made.retokenised, made.open_ended) == (1, 1, int(not known))


def test_a_call_that_lacks_more_than_ids_is_never_made_into_one(tokenizer: ChatTokenizer) -> None:
    frozen, told = {"UNTRAINABLE": "node reasoner is declared frozen"}, {"PROMPT_IDS": [1], "SAMPLED_IDS": [2, 3]}
    redacted = {"UNTRAINABLE": f"ingested from x: no token ids and no log-probs {FROM_ENGINE}; redacted: card"}
    spans = hosted([frozen, redacted, told, {"ok": False}])
    before = list(spans_to_trajectory(spans).actions)
    actions, made = retokenised(spans, tokenizer)
    assert actions == before
    assert (made.without_ids, made.retokenised) == (0, 0)
    assert Retokeniser(tokenizer, ["actor"]).trajectory_to_retokenised(
        spans_to_trajectory(hosted([{}])), lambda _: spans
    ) == spans_to_trajectory(hosted([{}]))


@pytest.mark.parametrize(
    ("changed", "root", "limits", "reason"),
    [
        ({"ok": False, "UNTRAINABLE": f"ingested from x: no token ids {FROM_ENGINE}"}, {}, (), "the call failed"),
        ({"FINISH_REASONS": ["content_filter"]}, {}, (), "a filter of the provider cut the answer"),
        ({"OUTPUT_MESSAGES": None}, {}, (), "its answer was not recorded"),
        (
            {},
            {"LINEAGE": json.dumps({"tools/reasoner": "a" * 64})},
            (),
            "it offered tools that the record does not hold",
        ),
        ({}, {}, (None, 20, 300), "longer than the base model reads"),
    ],
)
def test_a_call_that_cannot_be_made_into_one_keeps_what_it_had_and_says_why(
    tokenizer: ChatTokenizer, changed: dict[str, Any], root: dict[str, Any], limits: Sequence[int | None], reason: str
) -> None:
    (action,), made = retokenised(hosted([changed], **root), tokenizer, limits=limits)
    assert (action.prompt_ids, action.sampled_ids) == (None, None)
    assert action.untrainable_reason == f"not re-tokenised: {reason}"
    assert made.refused == {reason: 1}
    assert made.summary() == f"0 of 1 stored calls without token ids were re-tokenised for imitation; not 1: {reason}"


def test_a_call_whose_span_was_erased_is_left_out(tokenizer: ChatTokenizer) -> None:
    made = Retokeniser(tokenizer, ["reasoner"])
    (action,) = made.trajectory_to_retokenised(spans_to_trajectory(hosted([{}])), lambda _: []).actions
    assert action.untrainable_reason == "not re-tokenised: its span is not stored"


def test_a_lineage_without_tools_says_that_there_were_none(tokenizer: ChatTokenizer) -> None:
    _, made = retokenised(hosted([{}], LINEAGE=json.dumps({"base": "a" * 64})), tokenizer)
    assert made.retokenised == 1


def test_the_longest_call_is_what_the_model_says(model: Path, tmp_path: Path) -> None:
    assert context_length(model) == 256
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
    assert context_length(tmp_path) == 64
    (tmp_path / "config.json").write_text("{}")
    assert context_length(tmp_path) is None


# -- traces of others --------------------------------------------------------------------------------------------


def taken_in(folder: Path, *requests: bytes) -> Path:
    """OTLP requests -> the store of a folder."""
    path = folder / "traces"
    path.write_bytes(framed(*requests))
    ingest_files([path], folder / "store.duckdb", RecordOptions(), Reporter(Console(file=io.StringIO())))
    return folder / "store.duckdb"


@pytest.mark.parametrize("instrumentor", ["openinference", "traceloop", "langsmith"])
def test_calls_that_another_project_recorded_are_rendered_whatever_its_conventions(
    tmp_path: Path, instrumentor: str
) -> None:
    folder = save_chat_tokenizer(tmp_path, TOOLS)
    made = Retokeniser(ChatTokenizer(folder), ["plan", "left", "outer/polish"])
    with TraceStore.open(taken_in(tmp_path, *foreign_requests(instrumentor))) as store:
        first, *_ = store.trajectories()
        found = made.trajectory_to_retokenised(first, store.spans)
        assert store.trajectory(first.episode.episode_id) == first  # nothing is written
    by_node = {action.node: action for action in found.actions}
    # The app's model was given no tools, and asked for one: what it was told cannot be known.
    assert by_node["plan"].untrainable_reason == "not re-tokenised: it offered tools that the record does not hold"
    assert by_node["right"] == next(action for action in first.actions if action.node == "right")
    end = "<|im_end|>" if instrumentor != "traceloop" else ""  # OpenLLMetry does not say how an answer ended
    left, polish = by_node["left"], by_node["outer/polish"]
    assert decoded(folder, left.prompt_ids or ()) == (
        '<|im_start|>assistant\n[call add {"a": 1, "b": 1}]<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    assert decoded(folder, left.sampled_ids or ()) == f"left says two{end}"
    assert decoded(folder, polish.prompt_ids or ()) == (
        "<|im_start|>user\nleft says two right says two<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decoded(folder, polish.sampled_ids or ()) == f"two{end}"
    assert made.open_ended == (0 if end else 2)


# -- what learns from them ---------------------------------------------------------------------------------------


def duo_request(number: int, said: str) -> bytes:
    """One run of a duo as OpenInference exports it: the reasoner hints, the actor answers `said`."""
    trace = f"{number + 1:032x}"

    def node(span_id: str, name: str, step: int) -> Any:
        where = {"langgraph_node": name, "langgraph_checkpoint_ns": f"{name}:{number}", "langgraph_step": step}
        return hand_made(
            *(span_id, "1", name, 10 * step, 10 * step + 9),
            trace=trace,
            attributes=openinference("CHAIN", metadata=json.dumps(where)),
        )

    def call(span_id: str, parent: str, step: int, messages: list[tuple[str, str]], answer: str) -> Any:
        flat: dict[str, Any] = {"llm.finish_reason": "stop"}
        for key, told in (("input", messages), ("output", [("assistant", answer)])):
            for place, (role, content) in enumerate(told):
                flat[f"llm.{key}_messages.{place}.message.role"] = role
                flat[f"llm.{key}_messages.{place}.message.content"] = content
        return hand_made(
            *(span_id, parent, "ChatHosted", 10 * step + 1, 10 * step + 8),
            trace=trace,
            attributes=openinference("LLM", **flat),
        )

    spans = [
        hand_made("1", None, "LangGraph", 0, 90, trace=trace, attributes=openinference("CHAIN")),
        node("2", "reasoner", 1),
        call("3", "2", 1, [("system", "reasoner"), ("user", QUESTION)], "add them"),
        node("4", "actor", 2),
        call("5", "4", 2, [("system", "actor"), ("user", f"{QUESTION} add them")], said),
    ]
    body: bytes = request(*spans).SerializeToString()
    return body


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve imported runs: every third said four and earned 1, the others said five and earned 0."""
    folder = tmp_path_factory.mktemp("traces")
    path = taken_in(folder, *(duo_request(number, "five" if number % 3 else "four") for number in range(12)))
    with TraceStore.open(path) as store:
        good = [t for t in store.trajectories() if t.actions[1].completion == "four"]
        assert len(good) == 4
        ids = {t.episode.episode_id for t in good}
        rewards = [Reward(e.episode_id, "reward", float(e.episode_id in ids), "test", 1) for e in store.episodes()]
        store.put_rewards(rewards)
    return path


def read(path: Path, tokenizer: ChatTokenizer) -> list[Trajectory]:
    made = Retokeniser(tokenizer, NODES)
    with TraceStore.open(path) as store:
        return [made.trajectory_to_retokenised(trajectory, store.spans) for trajectory in store.trajectories()]


def trainer(model: Path, **offline: Any) -> MarftTrainer:
    fields = {"device": "cpu", "threads": 1, "lr": 0.01, "offline": offline}
    return MarftTrainer(trainer_options(**fields), model, NODES, seed=0)


def test_an_imported_duo_is_imitated_where_it_was_good(model: Path, traces: Path, tokenizer: ChatTokenizer) -> None:
    episodes = read(traces, tokenizer)
    good, bad = (next(t.actions[1] for t in episodes if t.actions[1].completion == word) for word in ("four", "five"))
    assert decoded(model, good.sampled_ids or ()) == "four<|im_end|>"
    learner = trainer(model, mode="filtered", retokenise=True, epochs=10)

    def likely(action: Action) -> float:
        (found,) = learner.policies.logprobs_of("actor", [action])
        return sum(found)

    before = likely(good), likely(bad)
    result = learner.replay(episodes)
    assert result["used"] == 8  # two calls each of the four good runs
    assert result["drops"] == {"episode below offline.threshold": 8}
    for agent in result["agents"].values():
        assert (agent["actions"], agent["retokenised_share"]) == (4, 1.0)
        assert agent["adapter_moved"] > 0
    assert likely(good) > before[0] + 5  # nats
    assert likely(good) - likely(bad) > before[0] - before[1] + 1


def test_with_learning_off_nothing_moves(model: Path, traces: Path, tokenizer: ChatTokenizer) -> None:
    learner = trainer(model, mode="filtered", retokenise=True, epochs=0)
    result = learner.replay(read(traces, tokenizer))
    assert [agent["adapter_moved"] for agent in result["agents"].values()] == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["filtered", "awr", "asymre", "topr", "importance", "vtrace"])
def test_no_other_way_of_learning_takes_a_retokenised_action(
    model: Path, traces: Path, tokenizer: ChatTokenizer, mode: str
) -> None:
    """`filtered` neither, unless it was asked to."""
    episodes = read(traces, tokenizer)
    learner = trainer(model, mode=mode)
    expected = {f"action: {RETOKENISED}": 24, "episode without an action to train on": 12}
    assert learner.warm_up(episodes)["drops"] == expected
    result = learner.replay(episodes)
    assert (result["used"], result["drops"]) == (0, expected)
    assert {agent["retokenised_share"] for agent in result["agents"].values()} == {None}
    with pytest.raises(TrainError, match=f"no action of this round can be trained on: 24 x action: {RETOKENISED}"):
        learner.update(episodes)


def test_older_episodes_of_a_round_are_not_retokenised_ones(
    model: Path, traces: Path, tokenizer: ChatTokenizer
) -> None:
    options = trainer_options(device="cpu", threads=1, replay={"share": 0.5})
    learner = MarftTrainer(options, model, NODES, seed=0)
    fresh = [make_action(node, [1, 2], [3], logprobs=(-1.0,)) for node in NODES]
    scored = learner.policies.logprobs_of("reasoner", fresh[:1]) + learner.policies.logprobs_of("actor", fresh[1:])
    fresh = [replace(a, logprobs=tuple(map(float, found))) for a, found in zip(fresh, scored, strict=True)]
    result = learner.update([make_trajectory(fresh, reward) for reward in (0.0, 1.0)], read(traces, tokenizer)[:2])
    assert result["replayed"] == 0
    assert result["drops"][f"replay: action: {RETOKENISED}"] == 4


@pytest.mark.parametrize("use", ["on_policy", "replay", "imitation"])
def test_a_round_for_anything_but_demonstration_leaves_them_out(use: Use) -> None:
    """Also one that says that it has log-probs: the flag decides."""
    actions = [make_action(node, [1], [2], untrainable_reason=RETOKENISED) for node in NODES]
    data = trajectories_to_round([make_trajectory(actions, 1.0)], NODES, "reward", dict.fromkeys(NODES, 32), use)
    assert data.items == ()
    assert data.drops[f"action: {RETOKENISED}"] == 2


def test_demonstrations_hold_them_flagged_beside_the_engines_own() -> None:
    made = make_action("reasoner", [1], [2], logprobs=None, trainable=False, untrainable_reason=RETOKENISED)
    episode = make_trajectory([made, make_action("actor", [1], [2])], 1.0)
    data = trajectories_to_round([episode], NODES, "reward", dict.fromkeys(NODES, 32), "demonstration")
    assert [(item.agent, item.retokenised, item.behaviour) for item in data.items] == [
        ("reasoner", True, None),
        ("actor", False, (-1.0,)),
    ]
    strange = make_trajectory([replace(made, sampled_ids=(32,))], 1.0)
    data = trajectories_to_round([strange], NODES, "reward", dict.fromkeys(NODES, 32), "demonstration")
    assert "action: token ids outside the base model's vocabulary" in data.drops


@pytest.mark.parametrize("mode", ["awr", "asymre", "topr", "importance", "vtrace", "off"])
def test_the_option_is_refused_where_it_has_no_effect(mode: str) -> None:
    with pytest.raises(ValueError, match=r"offline\.retokenise applies to offline\.mode 'filtered' only"):
        OfflineOptions.model_validate({"mode": mode, "retokenise": True})


# -- the command -------------------------------------------------------------------------------------------------


def trained(folder: Path, model: Path, traces: Path, **offline: Any) -> tuple[str, dict[str, Any]]:
    """`marft-bridge train` without a round, on imported traces: what it said, and its offline figures."""
    with TraceStore.open(traces) as store:
        store_to_parquet(store, folder / "exported")
    with running(FakeVllm()) as server:
        config = BridgeConfig.model_validate(
            {
                "run": str(folder / "run"),
                "graph": {
                    "app": "graphs.math_duo:build",
                    "nodes": NODES,
                    "tasks": "graphs.math_duo:tasks",
                    "task_to_input": "graphs.math_duo:task_to_input",
                    "reward": "graphs.math_duo:reward",
                },
                "model": {"path": str(model)},
                "serve": {"attach": server.url},
                "train": {
                    "rounds": 0,
                    "traces": [str(folder / "exported")],
                    "trainer": {"system": {"device": "cpu", "threads": 1}, "offline": offline},
                },
            }
        )
        said = io.StringIO()
        train(config, Reporter(Console(file=said, width=400)), resume=False)
    (line,) = read_metrics(folder / "run" / "metrics.jsonl")
    return said.getvalue(), line["replay"]


def test_the_command_says_what_it_does_not_use(tmp_path: Path, model: Path, traces: Path) -> None:
    said, replay = trained(tmp_path, model, traces, mode="filtered")
    assert "24 stored calls have no token ids of an engine and are not learned from; offline.retokenise" in said
    assert replay["used"] == 0


def test_the_command_imitates_imported_traces_where_it_is_asked_to(tmp_path: Path, model: Path, traces: Path) -> None:
    said, replay = trained(tmp_path, model, traces, mode="filtered", retokenise=True)
    assert "24 of 24 stored calls without token ids were re-tokenised for imitation\n" in said
    assert replay["used"] == 8
    assert replay["agents"]["actor"]["retokenised_share"] == 1.0
    assert "offline, actor: learned from 4 of 12 stored calls; " in said
    assert "offline, actor: not 8: episode below offline.threshold\n" in said
    with TraceStore.open(traces) as store:
        assert {action.prompt_ids for t in store.trajectories() for action in t.actions} == {None}


def test_only_the_runs_that_a_person_marked_as_good_are_imitated(
    tmp_path: Path, model: Path, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = tmp_path / "traces.duckdb"
    shutil.copy(traces, marked)
    with TraceStore.open(marked, read_only=True) as store:
        ids = [episode.episode_id for episode in store.episodes()]
    for episode_id, opinions in zip(ids, (["--good"], ["--bad", "--good"], ["--good", "--bad"]), strict=False):
        for opinion in opinions:
            assert cli.run(["traces", "mark", episode_id, opinion, "--store", str(marked)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"episode {ids[2]}: marked 0"
    said, replay = trained(tmp_path, model, marked, mode="filtered", retokenise=True, reward="marked")
    assert replay["episodes"] == 2
    (actions,) = {agent["actions"] for agent in replay["agents"].values()}
    assert actions == 2
    assert f"offline, actor: not {len(ids) - 3}: episode without a finite reward 'marked'\n" in said
    assert "offline, actor: not 1: episode below offline.threshold\n" in said


def test_a_reward_that_no_stored_run_has_is_refused_before_a_server_starts(
    tmp_path: Path, model: Path, traces: Path
) -> None:
    with pytest.raises(ConfigError, match="no stored episode has a team reward 'markd'; they have: "):
        trained(tmp_path, model, traces, mode="filtered", retokenise=True, reward="markd")
