"""Owns: Sokoban (AT-GRPO): its rooms, its published rewards by hand, and its solutions against an independent search.

- Every task is solved by a search, in the number of moves it says, and those moves solve it; no room begins solved.
- What a move pays is theirs: steps, boxes on and off their goals, the end, and the shaping.
"""

from __future__ import annotations

import heapq
from typing import Any

import pytest

from graphs import sokoban


def position_of(*rows: str, step_limit: int = 99) -> dict[str, Any]:
    return {"room": list(rows), "steps": 0, "step_limit": step_limit}


def solve(rows: list[str]) -> list[str] | None:
    """Moves of a shortest solution by a search on drawn rooms, ordered by moves made and boxes that are not home."""
    width = len(rows[0])
    first = "".join(rows)
    open_rooms: list[tuple[int, int, str, str]] = [(first.count("$"), 0, first, "")]
    known = {first}
    best: str | None = None
    while open_rooms:
        _, count, room, moves = heapq.heappop(open_rooms)
        if "$" not in room:
            if best is None or len(moves) < len(best):
                best = moves
            continue
        if best is not None and count >= len(best):
            continue
        for move, offset in (("U", -width), ("D", width), ("L", -1), ("R", 1)):
            following = push(room, offset)
            if following is not None and following not in known:
                known.add(following)
                heapq.heappush(open_rooms, (count + 1, count + 1, following, moves + move))
    return None if best is None else list(best)


def push(room: str, offset: int) -> str | None:
    """The room after a move as a text, by what stands on the three cells in its way."""
    at = max(room.find("@"), room.find("+"))
    near, far = at + offset, at + 2 * offset
    cells = list(room)
    if cells[near] == "#":
        return None
    if cells[near] in "$*":
        if cells[far] in "#$*":
            return None
        cells[far] = "*" if cells[far] == "." else "$"
        cells[near] = "." if cells[near] == "*" else "_"
    cells[near] = "+" if cells[near] == "." else "@"
    cells[at] = "." if cells[at] == "+" else "_"
    return "".join(cells)


@pytest.mark.parametrize("level", sokoban.LEVELS, ids=lambda level: level.name)
def test_every_room_is_solved_in_the_moves_it_says_and_no_fewer(level: sokoban.Level) -> None:
    for task in sokoban.level_to_tasks(level, range(25 if level is sokoban.TWO_BOXES else 60)):
        moves = solve(task["room"])
        assert moves is not None
        assert len(moves) == task["shortest"]
        assert level.shortest <= len(moves) <= min(level.longest, level.step_limit)
        room = "".join(task["room"])
        assert room.count("$") == room.count(".") + room.count("+") == level.boxes
        assert len(task["room"]) == level.side
        played = sokoban.play(sokoban.task_to_input(task)["position"], " ".join(moves))
        assert (played.solved, played.bad_moves) == (True, 0)
        assert "$" not in "".join(played.position["room"])


def test_a_room_that_cannot_be_solved_is_known_for_one() -> None:
    corner = ["#####", "#$__#", "#_@.#", "#####"]
    room = sokoban.read_room(corner)
    assert sokoban.shortest_solution(room.floor, room.player, boxes=list(room.boxes), goals=list(room.goals)) is None
    assert solve(corner) is None


def test_the_levels_are_ordered_by_the_moves_of_their_solutions() -> None:
    means = []
    for level in sokoban.LEVELS:
        lengths = [task["shortest"] for task in sokoban.level_to_tasks(level, range(150))]
        means.append(sum(lengths) / len(lengths))
    assert means == sorted(means)
    assert means[3] > 2 * means[0]


def test_a_push_onto_the_goal_pays_as_worked_by_hand() -> None:
    # -0.01, 1 for the box, 10 for the end, and 0.1 for one cell nearer.
    played = sokoban.play(position_of("#####", "#@$.#", "#####"), "R")
    assert played.reward == pytest.approx(-0.01 + 1 + 10 + 0.1)
    assert played.position["room"] == ["#####", "#_@*#", "#####"]
    assert (played.solved, played.note) == (True, "R, at r2 c3, 0 bad, 1 of 1 boxes")


def test_a_push_off_a_goal_pays_back_what_that_onto_it_earned_and_the_shaping() -> None:
    room = position_of("######", "#@*_.#", "#_$__#", "######")
    # The box leaves its goal: two free goals then, the nearest one cell away; the other box is one away throughout.
    played = sokoban.play(room, "R")
    assert played.reward == pytest.approx(-0.01 - 1.0 + 0.1 * (-(1 + 1) - -(0 + 1)))
    assert not played.solved
    assert played.position["room"] == ["######", "#_+$.#", "#_$__#", "######"]


@pytest.mark.parametrize(
    ("rows", "move"),
    [
        (("#####", "#@$.#", "#####"), "L"),
        (("#####", "#@$##", "#__.#", "#####"), "R"),
        (("######", "#@$$.#", "#.___#", "######"), "R"),
    ],
)
def test_a_move_into_a_wall_or_against_a_box_that_is_stuck_pays_a_twentieth_and_changes_nothing(
    rows: tuple[str, ...], move: str
) -> None:
    played = sokoban.play(position_of(*rows), move)
    assert played.reward == pytest.approx(-0.05)
    assert (played.position["room"], played.bad_moves, played.over) == (list(rows), 1, False)


def test_a_box_that_is_pushed_on_and_off_a_goal_earns_nothing() -> None:
    room = position_of("########", "#@$._._#", "#_$____#", "########")
    there = sokoban.play(room, "R")
    further = sokoban.play(there.position, "R")
    assert there.reward == pytest.approx(-0.01 + 1.0 + 0.1)
    assert there.reward + further.reward < 0.1


def test_with_the_last_move_allowed_the_run_has_failed() -> None:
    played = sokoban.play(position_of("######", "#@_$.#", "######", step_limit=1), "R R")
    assert (played.solved, played.over, played.position["steps"]) == (False, True, 1)
    assert played.reward == pytest.approx(-0.01 - 5)


def test_walking_over_a_goal_leaves_it_there() -> None:
    played = sokoban.play(position_of("#####", "#@._#", "#_$_#", "#####"), "R R")
    assert played.position["room"] == ["#####", "#_.@#", "#_$_#", "#####"]
    assert sokoban.read_room(["#+#"]).goals == {(0, 1)}
