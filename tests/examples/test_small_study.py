"""Owns: that the games of the small study are played and graded as their module says, on any model."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from examples.study.small import ceiling, games, model
from examples.study.small.games import GAMES, to_trajectory
from examples.study.small.model import END, FAMILIES, MAX_TOKENS, WORDS, Draw, _supervisor, make_batch, words_to_ids
from examples.study.small.run import COMMON, CONDITIONS, merged, to_table
from trace_store.records import Action
from trainers import TrainerOptions


class Script:
    """Players that say what a function of agent and prompt says."""

    def __init__(self, say: Any) -> None:
        self.say = say

    def ask(self, agent: str, prompts: Sequence[Sequence[str]], max_tokens: int = MAX_TOKENS) -> list[Action]:
        rows = [(words_to_ids(prompt), words_to_ids([*self.say(agent, list(prompt)), "<end>"])) for prompt in prompts]
        return [games._to_action(agent, p, s, [-1.0] * len(s), 1, max_tokens) for p, s in rows]


def reward(game: str, task: tuple[int | str, ...], say: Any) -> float:
    (trajectory,) = GAMES[game].play(Script(say), [task])  # type: ignore[arg-type]
    value = trajectory.team_reward("reward")
    assert value is not None
    return value


@pytest.mark.parametrize(("said", "earned"), [(["12"], 1.0), (["12", "so", "3"], 0.1), (["3"], 0.0), ([], 0.0)])
def test_the_duo_earns_by_the_last_number_and_a_tenth_where_it_only_occurs(said: list[str], earned: float) -> None:
    assert reward("duo", (7, 5), lambda agent, _: said if agent == "actor" else ["hmm"]) == earned


def test_a_link_hears_what_the_one_before_it_said() -> None:
    def add(agent: str, prompt: list[str]) -> list[str]:
        return [str((int(prompt[1]) + int(prompt[3])) % 10)]

    assert reward("chain", (1, 2, 3, 4, 5, 6, 7, 8, 9), add) == 1.0
    assert (
        reward("chain", (1, 2, 3, 4, 5, 6, 7, 8, 9), lambda agent, p: ["3"] if agent == "link7" else add(agent, p))
        == 0.0
    )


def test_a_draft_beyond_the_first_costs_a_tenth() -> None:
    def say(verdict: str) -> Any:
        return lambda agent, _: [verdict] if agent == "router" else ["2"]

    assert reward("loop", (7, 5), say("done")) == 1.0
    assert reward("loop", (7, 5), say("again")) == pytest.approx(0.8)


def test_the_tool_computes_what_the_specialist_calls() -> None:
    def say(agent: str, prompt: list[str]) -> list[str]:
        if agent.endswith("specialist"):
            return ["calc", prompt[2], "*", prompt[4]]
        return [prompt[-1]] if "[tool]" in prompt else ["mul"]

    assert reward("supervisor", (6, "times", 7), say) == 1.0
    assert reward("supervisor", (6, "plus", 7), say) == 0.0


def test_tasks_that_are_trained_on_are_not_evaluated_on() -> None:
    for game in GAMES.values():
        assert set(game.tasks).isdisjoint(game.heldout)
        assert len(game.tasks) >= 45


def test_transcripts_are_the_same_for_the_same_seed_and_only_answers_are_learned() -> None:
    ids, labels = make_batch(Draw(0), 32)
    again, _ = make_batch(Draw(0), 32)
    assert (ids == again).all()
    learned = labels != -100
    assert (ids[learned] == labels[learned]).all()
    assert not learned[:, 0].any()
    assert len(FAMILIES) == len(GAMES)
    assert len(WORDS) > END


def test_a_clean_transcript_says_the_sum_and_nothing_else() -> None:
    draw = Draw(0)
    draw.clean = True
    ids, labels = make_batch(draw, 64)
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        text = [WORDS[i] for i in row]
        answer = [WORDS[i] for i in label if i >= 0]
        if text[0] == "[writer]":
            assert answer == [str(int(text[1]) - int(text[3])), "<end>"]
        if text[0] == "[reasoner]":
            assert answer == [*text[1:4], "=", str(int(text[1]) + int(text[3])), "<end>"]
    assert ids.tolist() != make_batch(Draw(0), 64)[0].tolist()


def test_of_clean_transcripts_those_of_the_supervisor_s_team_are_noisy_all_the_same() -> None:
    draw = Draw(0)
    draw.clean = True
    calls = [transcript for transcript in (_supervisor(draw) for _ in range(200)) if transcript[0][0] == "[specialist]"]
    assert {prompt[2] == answer[1] for prompt, answer in calls} == {True, False}  # copied as it was asked, or not


def test_a_number_is_one_token() -> None:
    assert [len(words_to_ids([str(number)])) for number in (-9, 0, 42, 81)] == [1, 1, 1, 1]


def test_the_model_s_folder_is_named_by_the_file_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(model, "pretrain", made.append)
    folder = model.ensure_model(tmp_path)
    assert made == [folder]
    assert folder.name == f"study-model-{sha256(Path(model.__file__).read_bytes()).hexdigest()[:12]}"


def test_the_writer_at_the_ceiling_earns_by_its_last_number() -> None:
    drafts = Script(lambda _, prompt: [str(int(prompt[1]) - int(prompt[3]))])
    guesses = Script(lambda _, prompt: ["7"])
    for players, share in ((drafts, 1.0), (guesses, 0.5)):
        assert ceiling.right_share(players, [(9, 2), (3, 5)]) == share  # type: ignore[arg-type]


def test_a_writer_that_does_not_learn_its_tasks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Script):
        class trainer:  # noqa: N801 - stands where players keep theirs
            @staticmethod
            def replay(_: Any) -> None: ...

    monkeypatch.setattr(ceiling, "MOST_LESSONS", 2)
    with pytest.raises(RuntimeError, match=r"right in 0\.000 of its runs after 2 lessons"):
        ceiling.teach(Deaf(lambda *_: ["7"]), [(3, 5)])  # type: ignore[arg-type]


def test_every_condition_is_one_that_the_trainer_takes() -> None:
    for changes in (*CONDITIONS.values(), *ceiling.CONDITIONS.values()):
        TrainerOptions.model_validate(merged(COMMON, changes))


def test_a_table_has_a_mean_and_its_standard_error() -> None:
    rows = [{"condition": "a", "game": "duo", "final": final} for final in (0.2, 0.4)]
    assert "0.300 ± 0.100 (2)" in to_table(rows)
    assert to_trajectory((1, 2), 0, [], 0.0, False).episode.task_id == "1 2"
