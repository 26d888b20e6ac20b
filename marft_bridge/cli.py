"""The command line: parse, call one function, print. What the commands do is in the modules named after them.

Invariant: nothing is decided here but what the words of a command line mean; how a command ends, and with which exit
code, is in `command_end`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from marft_bridge.commands.command_end import end_by_signals_as_by_interrupt, run_to_exit_code
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.extras import require_extra, require_trainer
from marft_bridge.common.progress import Reporter, open_reporter
from marft_bridge.common.terminal_text import text_to_lines
from marft_bridge.runs.run_choice import DEFAULT_CONFIG, RunChoice, run_folders_below
from marft_bridge.traces import cli as traces_cli
from marft_bridge.traces.cli import json_option

app = typer.Typer(
    name="marft-bridge",
    help="Record a LangGraph app, train one adapter per node on what it did, and prove whether it got better.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(traces_cli.app)

RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", help="The run folder.", show_default=False, autocompletion=run_folders_below),
]
RunOrStore = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run folder, a store, or an export of one.",
        show_default=False,
        autocompletion=run_folders_below,
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="The bridge.toml to read; bridge.toml, or what RUN notes.")
]
Run = Annotated[
    str | None, typer.Option("--run", help="Run folder; overrides `run`.", autocompletion=run_folders_below)
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, envvar="MARFT_SEED", help="Overrides `seed`.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")]


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"marft-bridge {metadata.version('marft-bridge')}")
        raise typer.Exit


@app.callback()
def _options_before_the_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    pass


def _dotted(**overrides: Any) -> dict[str, Any]:
    """`train__rounds` -> `train.rounds`: the keys of options that flags override."""
    return {key.replace("__", "."): value for key, value in overrides.items()}


def _typed(context: typer.Context, *names: str) -> list[str]:
    """Which of these options the command line has, as they are typed there; not what a variable or a default gives."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [f"--{name}" for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


class _CommandBeforeAnother(typer.core.TyperCommand):
    """A command that takes another one behind `--`, of whose words none is its own RUN."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keeps what stands behind `--` in `ctx.args`."""
        at = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:at])
        ctx.args = program = args[at + 1 :]
        return program


@app.command(
    epilog="Example: marft-bridge init graphs.math_duo:build --tasks graphs.math_duo:tasks "
    "--task-to-input graphs.math_duo:task_to_input --reward graphs.math_duo:reward --yes"
)
def init(
    app_name: Annotated[
        str, typer.Argument(metavar="APP", help="As graph.app: path/file.py:attribute, or a name in a langgraph.json.")
    ],
    nodes: Annotated[str | None, typer.Option(help="Nodes to train, with commas between.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="A JSONL or Parquet file, the name of an iterable, or gsm8k:train.jsonl.")
    ] = None,
    task_to_input: Annotated[str | None, typer.Option(help="A function task -> graph input.")] = None,
    context: Annotated[
        str | None, typer.Option(help="The context of the graph's runs: a JSON object, or a function task -> context.")
    ] = None,
    run_config: Annotated[
        str | None,
        typer.Option(help="LangGraph's config of the runs (configurable, recursion_limit, tags, metadata), likewise."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A function (task, final state) -> number; or numeric, exact, math, code, reasoning_gym, with a field "
            "of the final state and one of the task: numeric:answer=gold. What is left out is taken from both."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A directory or Hub name; smollm2-135m, which is small.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = DEFAULT_CONFIG,
    yes: Annotated[bool, typer.Option("--yes", help="Train every node in which a model is seen.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Run the app once, on the first task, to see which nodes call a model.")
    ] = False,
    as_json: Annotated[bool, json_option("file, nodes, train_tasks, heldout_tasks, reward")] = False,
) -> None:
    """List an app's nodes and write a commented bridge.toml.

    The nodes are listed with their models and tools. The app is opened, and run only with --probe: its models are
    then really called. What no flag says is asked for.
    """
    from marft_bridge.commands.init import Flags, commas_to_names
    from marft_bridge.commands.init import init as run_init

    if nodes is not None and yes:
        raise ConfigError("init: --nodes and --yes both say which nodes to train; leave one out")
    flags = Flags(
        nodes=commas_to_names(nodes or ""),
        tasks=tasks,
        reward=reward,
        model=model,
        out=out,
        yes=yes,
        force=force,
        task_to_input=task_to_input,
        probe=probe,
        context=context,
        run_config=run_config,
    )
    with open_reporter(as_json) as reporter:
        run_init(app_name, flags, reporter, ask_user=lambda question, default: typer.prompt(question, default=default))


@app.command(epilog="Example: marft-bridge collect --config examples/math_duo/bridge.toml --run runs/try --episodes 32")
def collect(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    seed: Seed = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Overrides `collect.episodes`.")] = None,
    in_flight: Annotated[int | None, typer.Option(min=1, help="Overrides `collect.in_flight`.")] = None,
    engine: Annotated[str | None, typer.Option(help="local or ray; overrides `collect.engine`.")] = None,
    resume: Resume = False,
    as_json: Annotated[
        bool, json_option("run_folder, store, outcomes, rewards, actions, trainable_actions, sampled_tokens")
    ] = False,
) -> None:
    """Run the graph on training tasks and record every run."""
    require_extra("train", "collect")
    changes = _dotted(seed=seed, collect__episodes=episodes, collect__in_flight=in_flight, collect__engine=engine)
    settings = RunChoice("collect", run_folder, config=config, run=run).to_config(changes)
    from marft_bridge.commands.collect import collect as run_collect

    with open_reporter(as_json) as reporter:
        run_collect(settings, reporter, resume)


@app.command(epilog="Example: marft-bridge train --config examples/math_duo/bridge.toml --run runs/try --rounds 2")
def train(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    seed: Seed = None,
    rounds: Annotated[int | None, typer.Option(min=0, help="Overrides `train.rounds`.")] = None,
    without_signal: Annotated[
        bool, typer.Option("--without-signal", help="Train although the rewards hardly tell runs apart.")
    ] = False,
    resume: Resume = False,
    as_json: Annotated[bool, json_option("run_folder, rounds, versions, best, metrics")] = False,
) -> None:
    """Learn from stored episodes, then fresh ones; publish adapters."""
    require_trainer("train")
    choice = RunChoice("train", run_folder, config=config, run=run)
    settings = choice.to_config(_dotted(seed=seed, train__rounds=rounds))
    from marft_bridge.training.train import train as run_train

    with open_reporter(as_json) as reporter:
        run_train(settings, reporter, resume, without_signal=without_signal)


@app.command(epilog="Example: marft-bridge compare --config examples/math_duo/bridge.toml --run runs/try --before 0")
def compare(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    seed: Seed = None,
    tasks: Annotated[int | None, typer.Option(min=2, help="Overrides `compare.tasks`.")] = None,
    before: Annotated[
        int | None, typer.Option(min=0, help="Version of every node before; without it 0, which changes nothing.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Version after: a number, newest or best; without it best, which training names.")
    ] = None,
    opponents: Annotated[
        str | None, typer.Option(help="Versions that play the variants and each other: 2,4,base. For two sides.")
    ] = None,
    non_inferior: Annotated[
        float | None,
        typer.Option(help="Not worse by this margin or more? Overrides `compare.non_inferior`."),
    ] = None,
    resume: Resume = False,
    promote_if: Annotated[
        str | None, typer.Option("--promote-if", help="Exit with 0 if it holds, 3 if not, 4 if not settled: correct>0.")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(help="With --promote-if: which variant it is asked of, where there are several.")
    ] = None,
    as_json: Annotated[bool, json_option("report (what report.json holds), files, gate, safety")] = False,
) -> None:
    """Run variants on held-out tasks, and say which is better.

    They run paired, and statistics say what may be claimed. The variants are those of [[compare.variants]];
    without any, every node's version 0 and the best.
    """
    require_extra("train", "compare")
    choice = RunChoice("compare", run_folder, config=config, run=run)
    settings = choice.to_config(_dotted(seed=seed, compare__tasks=tasks, compare__non_inferior=non_inferior))
    from marft_bridge.comparison.command import VersionFlags
    from marft_bridge.comparison.command import compare as run_compare
    from marft_bridge.comparison.page import REPORT_FILES
    from marft_bridge.config.compare import text_to_opponents, text_to_version
    from marft_bridge.config.gate_expression import expression_to_gate
    from marft_bridge.promotion.candidate_check import check_candidate, resolve_candidate

    if candidate is not None and promote_if is None:
        raise ConfigError("compare: --candidate has no effect without --promote-if")
    gate = expression_to_gate(promote_if) if promote_if is not None else None
    if gate is not None:
        candidate = resolve_candidate(settings, candidate)
    flags = VersionFlags(
        before,
        None if after is None else text_to_version("compare --after", after),
        () if opponents is None else text_to_opponents("compare --opponents", opponents),
    )
    with open_reporter(as_json) as reporter:
        report = run_compare(settings, reporter, resume, flags=flags)
        result = (
            None if gate is None else check_candidate(settings, report, gate, candidate=candidate, reporter=reporter)
        )
        findings = {"gate": None, "safety": []} if result is None else result.to_json()
        files = [str(settings.run_folder / name) for name in REPORT_FILES]
        reporter.give({"report": report.model_dump(mode="json"), "files": files, **findings})
    if result is not None:
        raise typer.Exit(result.exit_code)


@app.command(
    epilog='Example: marft-bridge promote --config examples/math_duo/bridge.toml --if "correct>0" --by "Jane Doe"'
)
def promote(
    context: typer.Context,
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    candidate: Annotated[str | None, typer.Option(help="A variant of the comparison; without it the only one.")] = None,
    gate: Annotated[
        str | None, typer.Option("--if", help="The condition; overrides `promote.gate`: correct>0 and tokens<1.2x.")
    ] = None,
    efficient: Annotated[
        bool,
        typer.Option(
            "--efficient", help="The cheapest efficient team of the report that is shown non-inferior, or --candidate."
        ),
    ] = False,
    by: Annotated[str | None, typer.Option(envvar="MARFT_SIGNED_BY", help="Who signs off.")] = None,
    rollback: Annotated[int | None, typer.Option(min=1, help="Sign off the versions of this manifest again.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check all manifests and weights, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Annotated[bool, json_option("outcome, gate, safety, manifests")] = False,
) -> None:
    """Sign off the adapter versions of a comparison's candidate.

    Only if the report and the safety suite allow it. Exits with 0 when it did, 3 when it was refused, 4 when the
    comparison settles nothing.
    """
    require_extra("train", "promote")
    settings = RunChoice("promote", run_folder, config=config, run=run).to_config()
    from marft_bridge.promotion.promote import PromotionRequest, roll_back
    from marft_bridge.promotion.promote import promote as run_promote
    from marft_bridge.promotion.promote import verify as run_verify

    def confirm(question: str) -> bool:
        if not yes and not sys.stdin.isatty():
            raise ConfigError("promote: there is no terminal to ask on; say --yes")
        return yes or typer.confirm("\n".join(text_to_lines(question)))

    if sum([verify, rollback is not None, candidate is not None or gate is not None or efficient]) > 1:
        raise ConfigError("promote: --verify, --rollback and a candidate with its condition are three ways; choose one")
    if verify and (unused := _typed(context, "by", "yes")):
        raise ConfigError(f"promote --verify signs nothing off; leave out {' and '.join(unused)}")
    with open_reporter(as_json) as reporter:
        if verify:
            exit_code = run_verify(settings, reporter)
        elif rollback is not None:
            exit_code = roll_back(settings, rollback, by, confirm=confirm, reporter=reporter)
        else:
            exit_code = run_promote(
                settings, PromotionRequest(candidate, gate, by, is_efficient=efficient), confirm, reporter=reporter
            )
    raise typer.Exit(exit_code)


@app.command(epilog="Example: marft-bridge credit --config examples/math_duo/bridge.toml --run runs/try --tasks 32")
def credit(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    seed: Seed = None,
    by: Annotated[
        Literal["agents", "forks"],
        typer.Option(help="Replace agents in whole runs, or fork recorded runs around each of their calls."),
    ] = "agents",
    nodes: Annotated[
        str | None, typer.Option(help="Agents to look at, with commas between; without it all of graph.nodes.")
    ] = None,
    substitute: Annotated[
        str,
        typer.Option(
            help="Who stands in: base (version 0), silent (an empty answer), version:N or text:ANSWER; nobody with"
            " none, by forks."
        ),
    ] = "base",
    method: Annotated[
        Literal["leave-one-out", "shapley"],
        typer.Option(help="Replace one at a time, or run every combination of up to 6 agents, which shows pairs too."),
    ] = "leave-one-out",
    tasks: Annotated[int | None, typer.Option(min=2, help="Training tasks; 32, or all of a stored run.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Runs of each task, 1; by forks, forks of each point, 2.")
    ] = None,
    forks: Annotated[int | None, typer.Option(min=1, help="Forks of all runs together, about; 256.")] = None,
    tools: Annotated[
        Literal["recorded", "run"] | None,
        typer.Option(help="By forks, tools before the forked call: give back what they gave, or run again; recorded."),
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Version of every node in the team: a number, newest or best; best.")
    ] = None,
    run_of: Annotated[
        str | None,
        typer.Option(
            help="A stored run, such as collect, whose episodes are the team's, and get the rewards; by forks, whose"
            " episodes are forked: collect."
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="The team reward that is shared out; train.trainer.reward.")
    ] = None,
    worth: Annotated[
        float, typer.Option(min=0, help="An agent that is shown to add less than this is called lazy.")
    ] = 0.05,
    resume: Resume = False,
    as_json: Annotated[
        bool,
        json_option(
            "run, metric, method, substitute, agents, pairs, rewards_of, rewards_written; by forks run, by, run_of,"
            " metric, substitute, runs, tasks, forks, agents, calls, leave_one_out, failures, passed_over"
        ),
    ] = False,
) -> None:
    """Replace agents in turn, and say what each contributes.

    All teams run on the same tasks and seeds. With `--by forks`, recorded runs are forked around each of their calls,
    which says what each call decides, and what it adds.
    """
    require_extra("train", "credit")
    settings = RunChoice("credit", run_folder, config=config, run=run).to_config(_dotted(seed=seed))
    from marft_bridge.agent_credit.command import CreditOptions
    from marft_bridge.agent_credit.command import credit as run_credit
    from marft_bridge.config.compare import BEST, text_to_version

    agents = tuple(name.strip() for name in nodes.split(",")) if nodes is not None else ()
    if by == "forks":
        from marft_bridge.fork_credit.command import ForkCreditOptions, credit_by_forks

        for name, is_given in (
            ("--method", method != "leave-one-out"),
            ("--tasks", tasks is not None),
            ("--version", version is not None),
        ):
            if is_given:
                raise ConfigError(f"credit {name} has no effect with --by forks: its runs are stored ones")
        typed: dict[str, Any] = {"forks": forks, "samples": samples, "run_of": run_of, "tools": tools}
        typed = {name: value for name, value in typed.items() if value is not None}
        fork_options = ForkCreditOptions(agents, substitute, metric=metric, min_contribution=worth, **typed)
        with open_reporter(as_json) as reporter:
            credit_by_forks(settings, fork_options, reporter, resume=resume)
        return
    for name, is_given in (("--forks", forks is not None), ("--tools", tools is not None)):
        if is_given:
            raise ConfigError(f"credit {name} needs --by forks")
    if run_of is not None and samples is not None:
        raise ConfigError("credit --samples has no effect with --run-of: its episodes are there")
    if run_of is not None and version is not None:
        raise ConfigError("credit --version has no effect with --run-of: its episodes are of its versions")
    options = CreditOptions(
        agents,
        substitute,
        method,
        tasks=tasks,
        samples=samples or 1,
        version=text_to_version("credit --version", BEST if version is None else version),
        run_of=run_of,
        metric=metric,
        min_contribution=worth,
    )
    with open_reporter(as_json) as reporter:
        run_credit(settings, options, reporter, resume=resume)


@app.command(
    epilog="Example: marft-bridge distil runs/math_duo --into solver --config examples/team_in_one/bridge.toml"
)
def distil(
    team: Annotated[
        Path,
        typer.Argument(
            metavar="TEAM",
            help="The team's run folder, a store, or an export of one.",
            show_default=False,
            autocompletion=run_folders_below,
        ),
    ],
    into: Annotated[str, typer.Option(metavar="NODE", help="The app's one LLM node, which says what the team said.")],
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    as_json: Annotated[bool, json_option("run, run_folder, read, distilled, refused, team, node, adapters")] = False,
) -> None:
    """Make the good runs of a team the training of one node.

    The app that RUN or --config names is run on the tasks of these runs, without a model: its node answers with what
    the team's agents said. `train` imitates that first, then goes on with rewards.
    """
    require_extra("train", "distil")
    settings = RunChoice("distil", run_folder, config=config, run=run).to_config()
    from marft_bridge.distillation.command import distil as run_distil

    with open_reporter(as_json) as reporter:
        run_distil(settings, team, into, reporter=reporter)


@app.command(
    epilog="Example: marft-bridge score --config examples/math_duo/bridge.toml --run runs/try --only graph.reward"
)
def score(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A reward by its name, or graph.reward; may be repeated.")
    ] = None,
    as_json: Annotated[
        bool, json_option("episodes, left_out, rewards, parts, missing, failures, needs_final_state")
    ] = False,
) -> None:
    """Compute the rewards of stored episodes again.

    No episode is run again.
    """
    settings = RunChoice("score", run_folder, config=config, run=run).to_config()
    from marft_bridge.commands.score import score as run_score

    with open_reporter(as_json) as reporter:
        run_score(settings, only or (), reporter)


@app.command(epilog="Example: marft-bridge plan langfuse.duckdb --prices prices.toml --model smollm2-135m")
def plan(
    context: typer.Context,
    run_folder: RunOrStore = None,
    config: Config = None,
    run: Run = None,
    prices: Annotated[Path | None, typer.Option(help="A TOML or JSON file of prices, which the store keeps.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The local base: a directory, a Hub name, smollm2-135m, or none; [model] of bridge.toml."),
    ] = None,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each node that are read and scored, at most.")] = 48,
    metric: Annotated[
        str | None, typer.Option(help="The team reward; train.trainer.reward, or the only one there is.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, envvar="MARFT_SEED", help="Of the draw of calls and episodes.")] = 0,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Only hold earlier predictions against what train and compare measured since, in this run folder.",
            autocompletion=run_folders_below,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        json_option(
            "store, run, episodes, left_out, drawn, nodes, rewards, rule, proposal, missing, calibration, order"
        ),
    ] = False,
) -> None:
    """Say which nodes to move to a local model, and why.

    What each does, costs and answers, how well the local model predicts it, and what hangs on it.
    """
    from marft_bridge.move_plan.command import PlanOptions, show_calibration
    from marft_bridge.move_plan.command import plan as run_plan
    from marft_bridge.replay.episodes import path_to_store

    choice = RunChoice("plan", run_folder, config=config, run=run)
    path = path_to_store(choice.to_folder())
    unused = _typed(context, "prices", "model", "calls", "metric", "seed")
    if calibration is not None and unused:
        raise ConfigError(f"plan --calibration makes no plan; leave out {' and '.join(unused)}")
    with open_reporter(as_json) as reporter:
        if calibration is not None:
            show_calibration(path, calibration, reporter)
            return
        options = PlanOptions(prices, model, calls=calls, metric=metric, seed=seed)
        run_plan(path, choice.to_config_if_any(), options, reporter)


@app.command(
    epilog="Example: marft-bridge rank runs/try --rubric rubric.txt --base-url http://127.0.0.1:8000/v1 --model judge"
)
def rank(
    base_url: Annotated[str, typer.Option(help="Where the judge is served, up to and with /v1.")],
    model: Annotated[str, typer.Option(help="The judge's name there.")],
    run_folder: traces_cli.RunArgument = None,
    config: traces_cli.Config = None,
    run: traces_cli.Run = None,
    rubric: Annotated[
        Path | None, typer.Option(help="A text file: what is better; a jinja2 template of the task's fields.")
    ] = None,
    propose_rubric: Annotated[
        Path | None,
        typer.Option(
            help="Rank nothing; have the model propose a rubric from the runs, and write it to this new file."
        ),
    ] = None,
    node: Annotated[str | None, typer.Option(help="Compare only this node's answers, and reward the node.")] = None,
    name: Annotated[str | None, typer.Option(help="The reward's name; ranked.")] = None,
    constrained: Annotated[
        bool,
        typer.Option(
            "--constrained", help="The judge's server holds replies to a JSON schema, as vLLM can; for small judges."
        ),
    ] = False,
    runs: Annotated[int, typer.Option(min=2, help="Runs of a task that are compared, at most.")] = 8,
    api_key_env: Annotated[str | None, typer.Option(help="Variable that holds the judge's key.")] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="The judge may be on another machine, which then sees the answers.")
    ] = False,
    as_json: Annotated[
        bool,
        json_option(
            "tasks, source, pairs, ties, inconsistent, unanswered, without_reward, rewards_written, prompt_tokens, "
            "sampled_tokens; of a proposal rubric, tasks, criteria, left_out, prompt_tokens, sampled_tokens"
        ),
    ] = False,
) -> None:
    """Have a judge compare the runs of each task, in pairs.

    Each pair twice, with the places swapped; what both verdicts agree on becomes rewards.
    """
    from pydantic import ValidationError

    from marft_bridge.commands.propose_rubric import ProposeOptions
    from marft_bridge.commands.propose_rubric import propose_rubric as run_propose_rubric
    from marft_bridge.commands.rank import RankOptions, file_to_rubric
    from marft_bridge.commands.rank import rank as run_rank
    from marft_bridge.rewards.judge import JudgeOptions
    from marft_bridge.rewards.rubric_proposal import QUESTION
    from marft_bridge.runs.run_folder import RunFolder
    from marft_bridge.traces.store_reader import open_for_reading

    if (rubric is None) == (propose_rubric is None):
        raise ConfigError(
            "rank: give --rubric FILE to rank by it, or --propose-rubric FILE to have one written; not both"
        )
    if propose_rubric is not None and (name is not None or constrained):
        raise ConfigError("rank --propose-rubric gives no reward; leave out --name and --constrained")
    path = RunChoice("rank", run_folder, config=config, run=run).to_store()
    with open_for_reading(path):
        pass  # a store that is not there is said before what is wrong with the judge
    reward = name or "ranked"
    try:
        judge = JudgeOptions(
            name=reward,
            answer_from="run",
            rubric=QUESTION if rubric is None else file_to_rubric(rubric),
            base_url=base_url,
            model=model,
            api_key_env=api_key_env,
            allow_remote=allow_remote,
        )
    except ValidationError as error:
        raise ConfigError(f"rank: {error.errors()[0]['msg']}") from None
    with open_reporter(as_json) as reporter:
        if propose_rubric is not None:
            run_propose_rubric(path, ProposeOptions(propose_rubric, judge, node, runs=runs), reporter)
            return
        keeping_folder = path.parent if path.name == RunFolder(path.parent).store.name else None
        options = RankOptions(reward, judge, node=node, runs=runs, constrained=constrained)
        run_rank(path, keeping_folder, options, reporter)


@app.command(
    cls=_CommandBeforeAnother,
    epilog="Example: marft-bridge serve --config examples/math_duo/bridge.toml --run runs/try -- sleep 60",
)
def serve(
    context: typer.Context,
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    split: Annotated[
        str | None, typer.Option(help="Share an app's traffic out: percent of base and candidate, as 90/10.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="A version, promoted, or NODE=VERSION,...; what was promoted, or 0.")
    ] = None,
    candidate: Annotated[str | None, typer.Option(help="A version, best, newest, or NODE=VERSION,...; best.")] = None,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Send what base answers to the candidate too, in the shadow.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Where the app sends its requests; 8100, 0 takes a free one.")
    ] = None,
    key_env: Annotated[str | None, typer.Option(help="Variable that holds the app's key.")] = None,
    quiet_seconds: Annotated[
        float | None, typer.Option(min=0, help="A graph run has ended after so long without a call; 60.")
    ] = None,
) -> None:
    """Serve a run's model, while a command runs or until Ctrl-C.

    The command is what stands after --. The other commands on the same run folder use this server instead of
    starting their own. With --split or --mirror
    it answers an app instead: each of its nodes calls the model of its own name, and base or candidate answers.
    """
    require_extra("train", "serve")
    settings = RunChoice("serve", run_folder, config=config, run=run).to_config()
    from marft_bridge.commands.serve import serve as run_serve
    from marft_bridge.live.flags import flags_to_live

    live = flags_to_live(split, base, candidate, mirror=mirror, port=port, key_env=key_env, quiet_s=quiet_seconds)
    raise typer.Exit(run_serve(settings, Reporter(), context.args, live=live))


@app.command(epilog="Example: marft-bridge status --config examples/math_duo/bridge.toml --run runs/try")
def status(
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    as_json: Annotated[
        bool,
        json_option(
            "run_folder, store, episodes, adapters, forecast, imitation, last_update, rounds, best, servers, devices, "
            "live, report, walls"
        ),
    ] = False,
) -> None:
    """Show a run folder's episodes, adapters, update and server."""
    settings = RunChoice("status", run_folder, config=config, run=run).to_config()
    from marft_bridge.commands.status import status as show_status

    with open_reporter(as_json) as reporter:
        show_status(settings, reporter)


@app.command(epilog="Example: marft-bridge view runs/math_duo")
def view(
    run_folder: RunOrStore = None,
    config: traces_cli.Config = None,
    run: traces_cli.Run = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen on 127.0.0.1; 0 takes a free one.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="The base model, to show tokens as text; as the run noted it, if left out.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Browse a run: episodes, training curves, comparisons.

    Episodes are shown as conversations and graphs, tokens by advantage, and a page follows a run that goes on.
    Listens on loopback until Ctrl-C, for whoever has the token of the printed address. Reads, and changes
    nothing.
    """
    from marft_bridge.view.command import view as run_view

    path = RunChoice("view", run_folder, config=config, run=run).to_folder()
    run_view(path, port, model, browser=not no_browser, reporter=Reporter())


@app.command(epilog="Example: marft-bridge export actor exported/actor --config examples/math_duo/bridge.toml --merged")
def export(
    node: Annotated[str, typer.Argument(help="The node, by its LangGraph name.")],
    folder: Annotated[Path, typer.Argument(help="Where to; must not exist or be empty.")],
    run_folder: RunArgument = None,
    config: Config = None,
    run: Run = None,
    version: Annotated[str | None, typer.Option(help="A number, best, newest or promoted; best.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="The whole model with the adapter merged in.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="What it calls its base model, as a Hub name; what the run trained on.")
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license", help="The license that the model card names, as apache-2.0; none.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Send it to this repository of the Hugging Face Hub, too.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: for everybody to see; private.")] = False,
    as_json: Annotated[bool, json_option("node, version, folder, merged")] = False,
) -> None:
    """Write a node's adapter as a peft folder, or a merged model.

    A model card is in it: tasks, training and the newest comparison's figures; no text of a trace, no private path.
    """
    require_extra("train", "export")
    settings = RunChoice("export", run_folder, config=config, run=run).to_config()
    from marft_bridge.commands.export import ExportFlags, export_node

    flags = ExportFlags(version, merged, base_model, license=license_name, push=push, public=public)
    with open_reporter(as_json) as reporter:
        export_node(settings, node, folder, flags=flags, reporter=reporter)


@traces_cli.app.command(epilog="Example: marft-bridge traces erase --subject u-17 --dry-run --run runs/try")
def erase(
    run_folder: traces_cli.RunArgument = None,
    config: traces_cli.Config = None,
    run: traces_cli.Run = None,
    store: traces_cli.Store = None,
    subject: Annotated[str | None, typer.Option(help="All that is recorded of this subject.")] = None,
    older_than: Annotated[str | None, typer.Option(help="All traces that ended so long ago: 90d, 12h, 4w.")] = None,
    exports: Annotated[list[Path] | None, typer.Option(help="An export folder to erase it from as well.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be erased.")] = False,
    as_json: Annotated[
        bool,
        json_option(
            "dry_run, traces, replays, rows, bytes_before, bytes_after, exports, exports_left, exports_unread, "
            "distilled_left, segments, segments_left, files, files_left, clusters_left, readers_left, adapters"
        ),
    ] = False,
) -> None:
    """Erase a subject, or what is old, from all files of a run.

    No byte of it is left; or it is said which file has it, and how to make that one again.
    """
    from marft_bridge.erasure import command

    request = command.flags_to_request(subject, older_than, exports or (), now_ns=time.time_ns())
    console = Console(highlight=False)
    path = RunChoice("traces erase", run_folder, config=config, run=run, store=store).to_store()
    command.erase(path, request, dry_run, as_json=as_json, console=console)


@app.command(epilog="Example: marft-bridge ingest traces.json --config examples/math_duo/bridge.toml --run runs/try")
def ingest(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILES]... [RUN]",
            help="OTLP files, or exports of Langfuse; then the run folder, or a store.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A bridge.toml: its run folder, redaction; bridge.toml.")
    ] = None,
    run: Run = None,
    store: Annotated[Path | None, typer.Option(help="The store, instead of a run folder's.")] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Receive OTLP over HTTP on loopback until Ctrl-C.")] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="With --listen; 4318 without it, 0 takes a free one.")
    ] = None,
    token_env: Annotated[str | None, typer.Option(help="With --listen: variable that holds the token.")] = None,
    quiet_seconds: Annotated[
        float | None, typer.Option(min=0, help="With --listen: a whole trace is done after so long without a span; 10.")
    ] = None,
    as_json: Annotated[
        bool,
        json_option(
            "traces, spans, stored_before, episodes, actions, rewards, conventions, missing, refused, "
            "removed_settings, redactions, unredactable, late_spans, rejected"
        ),
    ] = False,
) -> None:
    """Take in traces that other tracers recorded.

    Those of OpenInference, OpenLLMetry, LangSmith and Langfuse, as far as they go.
    """
    from marft_bridge.ingest.command import choice_to_target, flags_to_receiver, split_run
    from marft_bridge.ingest.command import ingest as run_ingest

    receiver = flags_to_receiver(listen, port, token_env, quiet_s=quiet_seconds)
    otlp_files, run_folder = split_run(files or [])
    target = choice_to_target(RunChoice("ingest", run_folder, config=config, run=run, store=store))
    with open_reporter(as_json) as reporter:
        run_ingest(otlp_files, target, receiver, reporter=reporter)


@app.command(epilog="Example: marft-bridge replay traces.duckdb --app my_app.py:graph")
def replay(
    run_folder: RunOrStore = None,
    episodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EPISODE]...", help="First digits of ids; without any, all."),
    ] = None,
    app_name: Annotated[str | None, typer.Option("--app", help="The app, as graph.app names it.")] = None,
    config: Config = None,
    run: Run = None,
    tools: Annotated[
        Literal["recorded", "run"], typer.Option(help="Give back what the tools gave, or run them again.")
    ] = "recorded",
    freeze_time: Annotated[
        bool, typer.Option("--freeze-time", help="Stop the app's clock at the start of each recorded run.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed `random` and numpy before each run.")] = None,
    connect: Annotated[
        bool, typer.Option("--connect", help="Let nodes connect past their models and tools, to a database.")
    ] = False,
    as_json: Annotated[bool, json_option("episodes, summary")] = False,
) -> None:
    """Run recorded episodes again without a model, and compare.

    Their recorded answers stand in for the models. The exit code is 1 when one does not come out the same.
    """
    from marft_bridge.replay.command import choice_to_models, flags_to_app, words_to_choice
    from marft_bridge.replay.command import replay as run_replay
    from marft_bridge.replay.replayed_run import ReplayOptions

    options = ReplayOptions(tools, freeze_time=freeze_time, seed=seed, allow_connections=connect)
    choice, prefixes = words_to_choice(run_folder, episodes or (), config, run=run)
    replayed_app, models = flags_to_app(app_name, choice), choice_to_models(choice)
    path, console = choice.to_folder(), Console(highlight=False)
    if not run_replay(path, prefixes, replayed_app, options, models=models, as_json=as_json, console=console):
        raise typer.Exit(1)


@app.command(epilog="Example: marft-bridge fork 4be1 runs/try --at planner:2 --samples 8")
def fork(
    episode: Annotated[str, typer.Argument(help="The first digits of an episode's id, as `traces list` prints it.")],
    run_folder: RunArgument = None,
    at: Annotated[
        str, typer.Option("--at", metavar="NODE[:K]", help="The call to make again: a node, and which of its calls.")
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="Forks, each with a seed of its own.")] = 8,
    with_version: Annotated[
        str | None, typer.Option("--with", help="Version that answers for that node from there on: a number or newest.")
    ] = None,
    say: Annotated[str | None, typer.Option(help="The text that answers the call, instead of a model.")] = None,
    tools: Annotated[
        Literal["recorded", "run"], typer.Option(help="Tools before the call: give back what they gave, or run again.")
    ] = "recorded",
    metric: Annotated[str | None, typer.Option(help="The team reward to report; train.trainer.reward.")] = None,
    config: Config = None,
    run: Run = None,
    seed: Seed = None,
    resume: Resume = False,
    as_json: Annotated[
        bool,
        json_option(
            "run, parent, node, call, variant, metric, given_again, checkpoint, earlier_runs, entered_at,"
            " spared_supersteps, not_entered, parent_reward, forks, mean, low, high, interval"
        ),
    ] = False,
) -> None:
    """Run a recorded episode up to a call, and sample on from there.

    Calls before it get their recorded answers.
    """
    require_extra("train", "fork")
    settings = RunChoice("fork", run_folder, config=config, run=run).to_config(_dotted(seed=seed))
    from marft_bridge.forks.command import ForkOptions
    from marft_bridge.forks.command import fork as run_fork

    options = ForkOptions(episode, at, samples=samples, version=with_version, text=say, metric=metric, tools=tools)
    with open_reporter(as_json) as reporter:
        run_fork(settings, options, reporter, resume=resume)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code: 0, 1 where all or most episodes failed or say nothing of what is
    better, 2 for another user error, 130 after Ctrl-C."""
    return run_to_exit_code(lambda: app(list(arguments)), arguments)


def main() -> None:
    """Entry point of the console script."""
    end_by_signals_as_by_interrupt()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
