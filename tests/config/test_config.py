"""Owns: bridge.toml is read exactly or refused in one line that says what, where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import ROOT

from marft_bridge.commands.rank import file_to_rubric
from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.prices import file_to_prices

MINIMAL = """
[graph]
app = "a:b"
nodes = ["x", "y"]
tasks = "t.jsonl"
reward = "a:r"
"""
ONE = "[[compare.variants]]\nname = 'a'\n"
SIDES = """
[train]
samples_per_task = 2
[train.trainer]
sides = {{ a = ["x"], b = [{}] }}
shaping = [{{ reward = "own", level = "agent", weight = 1.0 }}]
advantage = {{ estimator = "dr_mas" }}
"""
GROUPS_OF_8 = "[train]\nsamples_per_task = 8\n[train.trainer.advantage]\nestimator = 'rloo'\n"
TWO = ONE + "[[compare.variants]]\nname = 'b'\n"


def config_file(folder: Path, text: str) -> Path:
    path = folder / "bridge.toml"
    path.write_text(text)
    return path


def test_a_minimal_file_takes_every_default(tmp_path: Path) -> None:
    config = toml_to_config(config_file(tmp_path, MINIMAL))
    assert config.graph.nodes == ("x", "y")
    assert config.run_folder == Path("runs/app")
    assert config.train.trainer.advantage.estimator == "gae"


def test_a_flag_overrides_the_file_and_an_absent_flag_does_not(tmp_path: Path) -> None:
    path = config_file(tmp_path, MINIMAL + "[collect]\nepisodes = 7\n")
    config = toml_to_config(path, {"seed": 3, "collect.episodes": None, "train.rounds": 2, "run": "elsewhere"})
    assert (config.seed, config.collect.episodes, config.train.rounds) == (3, 7, 2)
    assert config.run_folder == Path("elsewhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeed = 1\n" + MINIMAL, "unknown key 'seeed'; did you mean 'seed'?"),
        (MINIMAL + "[train]\nroundz = 1\n", "unknown key 'train.roundz'; did you mean 'rounds'?"),
        (
            MINIMAL + "[train.trainer.advantage.critic]\nhidde = 1\n",
            "unknown key 'train.trainer.advantage.critic.hidde'; did you mean 'hidden'?",
        ),
        (MINIMAL + "[collect]\nqqq = 1\n", "unknown key 'collect.qqq'; known here: engine, episodes, in_flight"),
        (MINIMAL + "[serve]\nmax_lorass = 1\n", "unknown key 'serve.max_lorass'; did you mean 'max_loras'?"),
        (
            MINIMAL + "[[rewards]]\nname = 'a'\nkind = 'json_schema'\nanswer_from = 'a'\nshema = {}\n",
            "unknown key 'rewards.0.json_schema.shema'; did you mean 'schema'? (and 1 more)",
        ),
        (MINIMAL.replace('["x", "y"]', '["x", "x"]'), "graph.nodes: 'x' is there twice"),
        (MINIMAL.replace('["x", "y"]', '["x", ""]'), "graph.nodes: a name is empty"),
        (MINIMAL + "frozen = ['z', 'z']\n", "graph.frozen: 'z' is there twice"),
        (
            MINIMAL + "[[rewards]]\nname = 'a'\nkind = 'composite'\nof = ['b', 'b']\n",
            "rewards.0.composite.of: 'b' is there twice",
        ),
        ("[graph]\nnodes = ['x']\n", "the key 'graph.app' is missing (and 1 more)"),
        ("seed = \n", "is not valid TOML"),
        ("graph = 3\n", "graph: Input should be"),
        (MINIMAL + "[train]\nrounds = -1\n", "train.rounds: Input should be greater than or equal to 0"),
        (MINIMAL + "[train.trainer.advantage]\nestimator = 'grpo'\n", "set train.samples_per_task to 2 or more"),
        (
            MINIMAL + "[train]\nsamples_per_task = 2\n[train.trainer.advantage]\nestimator = 'c3'\n",
            "'c3' learns from forked calls: add a table [train.trees]",
        ),
        (
            MINIMAL
            + "[train]\nsamples_per_task = 2\n[train.trees]\n[train.trainer.advantage]\nestimator = 'at_grpo'\n"
            + "[train.trainer.replay]\nsuccesses = 0.3\n[train.trainer.experimental]\nsuccess_groups = true\n",
            "success_groups does not go with train.trainer.advantage.estimator 'at_grpo' and [train.trees]",
        ),
        (
            MINIMAL
            + "[train]\nsamples_per_task = 2\n[train.trainer.advantage]\nestimator = 'grpo'\ngae_lambda = 0.5\n",
            "advantage.gae_lambda has no effect here: it applies to advantage.estimator 'gae' only",
        ),
        (
            MINIMAL + "[train.trainer.agents.reasoner]\nadapterr = 'x'\n",
            "unknown key 'train.trainer.agents.reasoner.adapterr'; did you mean 'adapter'?",
        ),
        (
            MINIMAL + "[[train.trainer.shaping]]\nreward = 'x'\nlevel = 'step'\nweight = 1\nwieght = 1\n",
            "unknown key 'train.trainer.shaping.0.wieght'; did you mean 'weight'?",
        ),
        (
            MINIMAL + "[train.trainer.agents.nobody]\nfrozen = true\n",
            "train.trainer.agents.nobody: not in graph.nodes",
        ),
        (MINIMAL + SIDES.format("'nobody'"), "train.trainer.sides: 'nobody' is not in graph.nodes"),
        (
            MINIMAL + "limit_reward = -1\n" + SIDES.format("'y'"),
            "graph.limit_reward is a reward of the team, and with train.trainer.sides nobody earns one: leave it out",
        ),
        (MINIMAL + "limit_reward = nan\n", "graph.limit_reward: Input should be a finite number"),
        (MINIMAL.replace('"y"', '"y", "judge"') + SIDES.format("'y'"), "node 'judge' is of no side"),
        (
            MINIMAL + SIDES.format("'y'") + "[train.league]\nversions = 2\n[serve]\nmax_loras = 4\n",
            "2 nodes with 3 + 1 versions need 8",
        ),
        (MINIMAL + "[train]\nepisodes_per_round = 9\nsamples_per_task = 2\n", "must be a multiple"),
        (
            MINIMAL + GROUPS_OF_8 + "[train.trainer.replay]\nshare = 0.07\n",
            "replay.share 0.07 lets 7 older episodes join a round, and the samples of a task, 8 or more, join together",
        ),
        (
            MINIMAL + "[train.trainer.experimental]\ndual_clip = 3\n",
            "train.trainer.experimental.dual_clip has no effect here: it is about calls that did worse than expected",
        ),
        (
            MINIMAL + "[train.trainer.experimental]\noff_policy_mask = 0.1\n",
            "train.trainer.experimental.off_policy_mask has no effect here",
        ),
        (
            MINIMAL + "[train.trainer.objective]\nupdate = 'alternating'\nclip_low = 0.1\n",
            "train.trainer.objective.clip_low has no effect here",
        ),
        (
            MINIMAL + "[train]\nlearners = 2\ndevices = [1]\n",
            "train.devices names 1 card for 2 learners, and each has one: set learners = 1, or name 2",
        ),
        (
            MINIMAL + "[train]\ndevices = [1, 2]\n",
            "train.devices names 2 cards for 1 learner, and each has one: set learners = 2, or name 1",
        ),
        (MINIMAL + "[train]\nlearners = 2\ndevices = [1, 1]\n", "train: devices names a card twice: 1, 1"),
        (MINIMAL + "[train]\nlearners = 0\n", "train.learners: Input should be greater than or equal to 1"),
        (MINIMAL + "[serve]\nmax_loras = 3\n", "2 nodes with 1 + 1 versions need 4"),
        (MINIMAL + "[train.trainer.lora]\nrank = 16\n", "rank 16 is above serve.max_lora_rank 8"),
        (MINIMAL + TWO + "nmae = 'x'\n", "unknown key 'compare.variants.1.nmae'; did you mean 'name'?"),
        (
            MINIMAL + TWO + "serve = { max_lorass = 1 }\nmodel = 'm'\n",
            "unknown key 'compare.variants.1.serve.max_lorass'; did you mean 'max_loras'?",
        ),
        (MINIMAL + ONE, "variants: 'a' alone has nothing to be compared with; add another table"),
        (MINIMAL + ONE + ONE, "variants: two tables are called 'a'"),
        (MINIMAL + TWO + "adapters = 'latest'\n", "compare.variants.1.adapters: 'latest' is no version; give a number"),
        (MINIMAL + TWO + "adapters = { x = -1 }\n", "compare.variants.1.adapters: -1 is no version; give a number"),
        (MINIMAL + TWO + "nodes = ['x']\n", "'b': nodes has no effect without app; [graph] has its own"),
        (MINIMAL + TWO + "app = 'c:d'\n", "'b': nodes must name the LLM nodes of 'c:d' on the served model"),
        (MINIMAL + TWO + "model = 'm'\nadapters = 3\n", "'b': adapters belong to the base model that they were"),
        (MINIMAL + TWO + "own_models = true\nadapters = 3\n", "'b': adapters has no effect with own_models"),
        (MINIMAL + TWO + "serve = { max_loras = 8 }\n", "'b': serve has no effect without model"),
        (MINIMAL + "[compare]\nlooks = 3\n", "compare: looks has no effect without stop_early = true"),
        (
            MINIMAL + "[compare]\nstop_early = true\nranks = ['correct']\n",
            "compare: ranks: 'correct' decides at every look",
        ),
        (MINIMAL + "[compare]\npass_at = [1, 4]\n", "pass@4 needs as many samples; set samples_per_task to 4 or more"),
        (MINIMAL + "[compare]\nmixed_teams = 'off'\nmixed_candidate = 'after'\n", "mixed_candidate has no effect with"),
        (MINIMAL + "[compare]\nmixed_candidate = 'c'\n" + TWO, "mixed_candidate: 'c' is not one of: b"),
    ],
    ids=lambda value: value[-40:].strip() if isinstance(value, str) else None,
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        toml_to_config(config_file(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if "TOML" not in message:
        assert "bridge.toml" in str(caught.value)


def test_a_missing_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration at .*none\.toml; name one with --config"):
        toml_to_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        toml_to_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        toml_to_config(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    "text",
    [
        GROUPS_OF_8 + "[train.trainer.replay]\nshare = 0.08\n",  # 64 planned and 32 for flat ones: 8 older at most
        "[train.trainer.experimental]\ndual_clip = 3\n[train.trainer.objective]\nnegative_weight = 0.1\n",
        "[train]\nteacher = 'big'\nteacher_rounds = 1\n[train.trainer.experimental]\ndual_clip = 3\n",
        "[train.trainer]\ngranularity = 'token'\n[train.trainer.experimental]\noff_policy_mask = 0.1\n",
        "[train.trainer.objective]\nclip_low = 0.1\n",  # it bounds what agents before weigh
    ],
)
def test_what_has_an_effect_is_accepted(tmp_path: Path, text: str) -> None:
    toml_to_config(config_file(tmp_path, MINIMAL + text))


def test_a_byte_order_mark_is_none_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "bridge.toml"
    path.write_text(MINIMAL, encoding="utf-8-sig")
    assert toml_to_config(path).graph.nodes == ("x", "y")
    prices = tmp_path / "prices.toml"
    prices.write_text("currency = 'USD'\n[[prices]]\nmodel = 'm'\nprompt = 1\nsampled = 2\n", encoding="utf-8-sig")
    assert [price.model for price in file_to_prices(prices, "--prices").prices] == ["m"]
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Which is better?", encoding="utf-8-sig")
    assert file_to_rubric(rubric) == "Which is better?"


def test_the_example_configuration_is_valid() -> None:
    examples = [path for name in ("*/*.toml", "*/*/bridge.toml") for path in (ROOT / "examples").glob(name)]
    for path in examples:
        if "[graph]" in path.read_text():
            toml_to_config(path)


@pytest.mark.parametrize(
    ("names", "said", "metric"),
    [(["reward"], "", "reward"), (["reward", "correct"], "", "correct"), (["reward", "x"], "metric = 'x'", "x")],
)
def test_where_no_declared_reward_is_called_correct_the_trained_one_decides(
    tmp_path: Path, names: list[str], said: str, metric: str
) -> None:
    tables = "".join(f"[[rewards]]\nname = '{name}'\nkind = 'tokens'\n" for name in names)
    graph = "[graph]\napp = 'a:b'\nnodes = ['n']\ntasks = 't.jsonl'\n"
    (tmp_path / "bridge.toml").write_text(f"{tables}{graph}[compare]\n{said}\n")
    assert toml_to_config(tmp_path / "bridge.toml").compare.metric == metric
