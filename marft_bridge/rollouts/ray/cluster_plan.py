"""The costs of collecting on a cluster: GPUs and an assumed workload -> rates, bytes, and the number of stores needed.

`python -m marft_bridge.rollouts.ray.cluster_plan` prints the table of docs/cluster.md. Every figure there is one of
the formulas here; every constant says whether it was measured or assumed. Invariant: units are in the names, and a
rate is a mean over a long collection, without its start and its end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Measured on one core of a two-core machine, on the traces of `make bench` (random token ids: the worst case for
# compression) with 32, 256 and 1,024 tokens each of prompt and answer: a straight line through the ends.
JOURNAL_BYTES_PER_ACTION = 1_513.0
JOURNAL_BYTES_PER_TOKEN = 15.6
STORE_BYTES_PER_ACTION = 680.0
STORE_SHARE_OF_LISTS = 0.98
TAKE_IN_S_PER_ACTION = 230e-6
TAKE_IN_S_PER_TOKEN = 0.41e-6
FILING_S_PER_ACTION = 27e-6
FILING_S_PER_TOKEN = 0.042e-6
# Measured on the same traces: what the command tells each other learner of a round, as JSON.
LEARNER_BYTES_PER_ACTION = 790.0
LEARNER_BYTES_PER_TOKEN = 19.8
# By definition: a prompt token is an id of 4 bytes, a sampled one an id and a log-prob of 8.
LIST_BYTES_PER_PROMPT_TOKEN, LIST_BYTES_PER_SAMPLED_TOKEN = 4, 12
# By construction: a worker answers the driver at least this often.
EXCHANGES_PER_S = 2.0

SIZES = (10, 100, 1_000)


@dataclass(frozen=True, slots=True)
class Workload:
    """The assumptions on the app, the model and the network. Replace them with what you measure."""

    sampled_per_s: float = 2_000.0  # tokens of one GPU: a 7B model in bfloat16 with LoRA adapters, `in_flight` episodes
    in_flight: int = 64  # episodes of one GPU
    calls: int = 4  # of one episode: two agents, two turns each
    prompt_tokens: int = 1_200  # of one call
    sampled_tokens: int = 300  # of one call
    nodes: int = 2  # with an adapter each
    adapter_parameters: int = 39_976_960  # rank 16 on all linear layers of a 7B Llama: see `llama_adapter`
    adapter_bytes: int = 4  # of one parameter
    gpus_per_machine: int = 8  # which read an adapter once, together
    network_bytes_per_s: float = 1.25e9  # of the driver's machine: 10 Gbit/s


@dataclass(frozen=True, slots=True)
class Plan:
    """Rates and sizes of a whole cluster."""

    gpus: int
    sampled_per_s: float
    prompt_per_s: float
    actions_per_s: float
    episodes_per_s: float
    call_s: float  # until an answer is complete
    in_flight: int
    journal_bytes_per_s: float
    network_share: float  # of the driver's machine
    filing_cores: float  # of the driver, to check and file lines
    exchanges_per_s: float
    take_in_cores: float  # of the store's writer
    stores: int  # needed, each with a writer of one core
    store_bytes_per_day: float
    publish_bytes: float  # of one round: every machine reads every node's adapter
    publish_s: float  # where all of them read from the driver's machine
    learner_bytes_per_s: float  # to each learner beside the command, over the time in which a round is played


def llama_adapter(rank: int, layers: int = 32, hidden: int = 4_096, inner: int = 11_008) -> int:
    """Parameters of an adapter on q, k, v, o, gate, up and down: rank * (inputs + outputs) for each of them."""
    return layers * rank * (4 * (hidden + hidden) + 3 * (hidden + inner))


def workload_to_plan(gpus: int, workload: Workload) -> Plan:
    """The rates and sizes that follow from the workload, by proportion."""
    sampled_per_s = gpus * workload.sampled_per_s
    actions = sampled_per_s / workload.sampled_tokens
    tokens = workload.prompt_tokens + workload.sampled_tokens
    journal_bytes_per_s = actions * (JOURNAL_BYTES_PER_ACTION + JOURNAL_BYTES_PER_TOKEN * tokens)
    list_bytes = (
        workload.prompt_tokens * LIST_BYTES_PER_PROMPT_TOKEN + workload.sampled_tokens * LIST_BYTES_PER_SAMPLED_TOKEN
    )
    take_in_cores = actions * (TAKE_IN_S_PER_ACTION + TAKE_IN_S_PER_TOKEN * tokens)
    machines = math.ceil(gpus / workload.gpus_per_machine)
    published_bytes = machines * workload.nodes * workload.adapter_parameters * workload.adapter_bytes
    return Plan(
        gpus=gpus,
        sampled_per_s=sampled_per_s,
        prompt_per_s=actions * workload.prompt_tokens,
        actions_per_s=actions,
        episodes_per_s=actions / workload.calls,
        call_s=workload.sampled_tokens * workload.in_flight / workload.sampled_per_s,
        in_flight=gpus * workload.in_flight,
        journal_bytes_per_s=journal_bytes_per_s,
        network_share=journal_bytes_per_s / workload.network_bytes_per_s,
        filing_cores=actions * (FILING_S_PER_ACTION + FILING_S_PER_TOKEN * tokens),
        exchanges_per_s=gpus * EXCHANGES_PER_S,
        take_in_cores=take_in_cores,
        stores=max(1, math.ceil(take_in_cores)),
        store_bytes_per_day=actions * (STORE_BYTES_PER_ACTION + STORE_SHARE_OF_LISTS * list_bytes) * 86_400,
        publish_bytes=published_bytes,
        publish_s=published_bytes / workload.network_bytes_per_s,
        learner_bytes_per_s=actions * (LEARNER_BYTES_PER_ACTION + LEARNER_BYTES_PER_TOKEN * tokens),
    )


_ROWS: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("sampled tokens/s", lambda p: f"{p.sampled_per_s:,.0f}"),
    ("prompt tokens/s", lambda p: f"{p.prompt_per_s:,.0f}"),
    ("actions/s", lambda p: f"{p.actions_per_s:,.0f}"),
    ("episodes/s", lambda p: f"{p.episodes_per_s:,.1f}"),
    ("episodes in flight", lambda p: f"{p.in_flight:,}"),
    ("seconds of one call", lambda p: f"{p.call_s:.1f}"),
    ("journal to the driver, MB/s", lambda p: f"{p.journal_bytes_per_s / 1e6:,.1f}"),
    ("of the driver's network", lambda p: f"{p.network_share:.1%}"),
    ("driver's cores that file lines", lambda p: f"{p.filing_cores:.2f}"),
    ("questions of the driver/s, at least", lambda p: f"{p.exchanges_per_s:,.0f}"),
    ("cores that take lines into a store", lambda p: f"{p.take_in_cores:.2f}"),
    ("stores", lambda p: f"{p.stores}"),
    ("stores grow by, GB a day", lambda p: f"{p.store_bytes_per_day / 1e9:,.0f}"),
    ("adapters read in one round, GB", lambda p: f"{p.publish_bytes / 1e9:.2f}"),
    ("seconds of that, from one machine", lambda p: f"{p.publish_s:.1f}"),
    ("rounds to each other learner, MB/s", lambda p: f"{p.learner_bytes_per_s / 1e6:,.1f}"),
)


def plan_to_markdown(sizes: Sequence[int] = SIZES, workload: Workload = Workload()) -> str:
    """The table, one column a size."""
    plans = [workload_to_plan(gpus, workload) for gpus in sizes]
    lines = [f"| GPUs | {' | '.join(f'{gpus:,}' for gpus in sizes)} |", f"|---|{'---:|' * len(plans)}"]
    lines += [f"| {name} | {' | '.join(value_to_text(plan) for plan in plans)} |" for name, value_to_text in _ROWS]
    return "\n".join(lines) + "\n"


def gpus_of_one_store(workload: Workload = Workload()) -> int:
    """The number of GPUs whose episodes one writer, on one core, takes in as fast as they arrive."""
    return math.floor(1 / workload_to_plan(1, workload).take_in_cores)


def page_with_plan(page: str) -> str:
    """The text of docs/cluster.md with the current table in it."""
    head, _, rest = page.partition("<!-- plan -->\n")
    _, end, tail = rest.partition("<!-- /plan -->")
    return f"{head}<!-- plan -->\n{plan_to_markdown()}{end}{tail}"


if __name__ == "__main__":
    sys.stdout.write(plan_to_markdown())
