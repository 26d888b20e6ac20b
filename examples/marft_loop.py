"""MARFT on one page: two agents on one language model learn a game together, each by a LoRA adapter of its own.

    python examples/marft_loop.py [--granularity token]

The game: only the planner sees the secret, 0 or 1. It writes a plan of two tokens. Then the solver is called twice,
side by side: each call sees one token of the plan and answers with one token. The team earns the share of answers that
lie in the half of the vocabulary which the secret means: the planner has to invent words, and the solver to learn them.

Numbers of equations, sections and lines (of algorithm 3) are those of the MARFT paper, arXiv 2504.16129v1. `trainers/`
is the same with everything around it; tests/examples/test_marft_loop.py holds both to the same losses and gradients.
Units are what has an advantage: actions in MARFT-A, tokens in MARFT-T. A ragged list has one tensor per action.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 16
D = {"planner": (), "solver": (0,)}  # of the game: the actions, by position, that an agent's action directly depends on


class Settings(NamedTuple):
    """The knobs of one round."""

    granularity: str = "action"  # MARFT-A, one call is one decision; or "token": MARFT-T, one token is
    logprob_norm: str = "token"  # log pi(a): its tokens' mean ("Action Normalization"), or their "sum" (equation 6)
    gamma: float = 1.0  # discount per link of D
    gae_lambda: float = 0.95
    gamma_token: float = 1.0  # discount per token inside an action, MARFT-T
    token_lambda: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    mismatch_cap: float = 2.0  # of the importance weight between the policy that sampled and the one that is trained
    kl_stop: float = 0.1  # nats per token
    epochs: int = 1
    minibatch_actions: int = 16  # of one step
    max_grad_norm: float = 1.0


class Action(NamedTuple):
    """One call of an agent. The prompt is its rollout observation: profile, observation, predecessors' actions."""

    agent: str
    prompt: list[int]
    sampled: list[int]
    behaviour: list[float]  # log mu of each sampled token, as whatever sampled it said
    temperature: float
    after: tuple[int, ...]  # D: positions of the actions that this one directly depends on


class Episode(NamedTuple):
    """One run of the team, its actions in a topological order of D. Truncated: more reward might have followed."""

    actions: list[Action]
    reward: float
    truncated: bool = False


class Critic(nn.Module):
    """V(rollout observation): a small head on states of the frozen base model (section 4.2.1). At first V = 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(width, 64), nn.Linear(64, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.mean, self.scale = torch.tensor([]), torch.tensor([])  # of the first observations, [width]

    def forward(self, observations: Tensor) -> Tensor:
        """[N, width] to values [N]."""
        if not len(self.mean):  # hidden states have much in common; the little that differs tells prompts apart
            self.mean, self.scale = observations.mean(0), observations.std(0) + 1e-4
        standard = ((observations - self.mean) / self.scale).clamp(-5, 5)
        return self.output(self.hidden(standard).tanh()).squeeze(1)


class Team:
    """All that learns: an adapter and an optimiser for each agent, in the order of their updates, and one critic."""

    def __init__(self, base: PreTrainedModel, agents: list[str]) -> None:
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
        self.model = get_peft_model(base, lora, adapter_name=agents[0]).eval()
        for agent in agents[1:]:
            self.model.add_adapter(agent, lora)
        self.optimizers = {}
        for agent in agents:
            weights = [weight for name, weight in self.model.named_parameters() if f".{agent}." in name]
            self.optimizers[agent] = torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0)
        self.critic = Critic(base.config.hidden_size + len(agents))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-3)


@torch.no_grad()
def sample(model: PeftModel, agent: str, prompts: list[list[int]], count: int, dice: torch.Generator) -> list[Action]:
    """Prompts of one length to actions of `count` tokens, by plain steps over all logits (line 8)."""
    model.set_adapter(agent)
    ids, logps = torch.tensor(prompts), []
    for _ in range(count):
        logp = model(input_ids=ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=dice)
        ids = torch.cat([ids, token], dim=1)
        logps.append(logp.gather(1, token))
    rows = zip(prompts, ids[:, -count:].tolist(), torch.cat(logps, dim=1).tolist(), strict=True)
    return [Action(agent, prompt, sampled, behaviour, 1.0, D[agent]) for prompt, sampled, behaviour in rows]


def play(model: PeftModel, episodes: int, dice: torch.Generator) -> list[Episode]:
    """The game, all episodes at once."""
    secrets = [k % 2 for k in range(episodes)]
    plans = sample(model, "planner", [[2, secret] for secret in secrets], 2, dice)
    calls = [sample(model, "solver", [[3, plan.sampled[k]] for plan in plans], 1, dice) for k in (0, 1)]
    return [
        Episode([plan, *answers], sum((a.sampled[0] >= VOCABULARY // 2) == bool(secret) for a in answers) / 2)
        for secret, plan, *answers in zip(secrets, plans, *calls, strict=True)
    ]


def token_logprobs(model: PeftModel, agent: str, actions: list[Action]) -> list[Tensor]:
    """log pi of each sampled token, the terms of equation 6, at the temperature that sampled it. Ragged."""
    model.set_adapter(agent)
    ids = pad_sequence([torch.tensor(a.prompt + a.sampled) for a in actions], batch_first=True)
    temperature = torch.tensor([a.temperature for a in actions])[:, None, None]
    logp = (model(input_ids=ids[:, :-1]).logits / temperature).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return [row[len(a.prompt) - 1 :][: len(a.sampled)] for row, a in zip(logp, actions, strict=True)]


@torch.no_grad()
def observations(team: Team, actions: list[Action]) -> list[Tensor]:
    """Base model's last hidden state before each sampled token and after the last, and who acts. Ragged: tokens + 1."""
    ids = pad_sequence([torch.tensor(a.prompt + a.sampled) for a in actions], batch_first=True)
    with team.model.disable_adapter():
        hidden = team.model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    who = torch.tensor([[float(a.agent == agent) for agent in team.optimizers] for a in actions]).to(hidden)
    seen = torch.cat([hidden, who[:, None].expand(-1, hidden.shape[1], -1)], dim=2)
    return [row[len(a.prompt) - 1 :][: len(a.sampled) + 1] for row, a in zip(seen, actions, strict=True)]


def gae_along_dependencies(episode: Episode, values: list[Tensor], settings: Settings) -> list[Tensor]:
    """Values before each token of each action, and after its last, to its units' advantages (section 4.1.1). Ragged."""
    before = [v[:1] if settings.granularity == "action" else v[:-1] for v in values]
    advantages = [torch.zeros_like(v) for v in before]
    for i in reversed(range(len(episode.actions))):
        dependents = [j for j, action in enumerate(episode.actions) if i in action.after]
        if dependents:  # their mean, since every branch leads to the same team reward; a sum would count it repeatedly
            reward, value = 0.0, torch.stack([before[j][0] for j in dependents]).mean()
            advantage = torch.stack([advantages[j][0] for j in dependents]).mean()
        else:  # the team reward arrives here; after a cut V stands for what would have followed
            reward, value, advantage = episode.reward, values[i][-1] if episode.truncated else 0.0, 0.0
        advantages[i][-1] = reward + settings.gamma * (value + settings.gae_lambda * advantage) - before[i][-1]
        for t in reversed(range(len(before[i]) - 1)):  # MARFT-T: from token to token of one action
            delta = settings.gamma_token * before[i][t + 1] - before[i][t]
            advantages[i][t] = delta + settings.gamma_token * settings.token_lambda * advantages[i][t + 1]
    return advantages


def log_ratio(new: Tensor, old: Tensor, granularity: str, settings: Settings) -> Tensor:
    """log pi_new - log pi_old of one action's units, from those of its tokens; "action": of the whole (equation 6)."""
    if granularity == "token":
        return new - old
    return (new - old).mean(0, keepdim=True) if settings.logprob_norm == "token" else (new - old).sum(0, keepdim=True)


def surrogate(new: Tensor, old: Tensor, action: Action, advantage: Tensor, settings: Settings) -> Tensor:
    """The clipped objective (equation 5) of one action, summed over its units; to be maximised."""
    ratio = log_ratio(new, old, settings.granularity, settings).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    behaviour = torch.tensor(action.behaviour, dtype=old.dtype)
    weight = log_ratio(old, behaviour, settings.granularity, settings).exp().clamp(max=settings.mismatch_cap)
    return (weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()


def improve(team: Team, agent: str, samples: list[tuple], settings: Settings, dice: torch.Generator) -> None:
    """Some clipped steps of one adapter (lines 15, 16, 18), on actions, old log-probs, advantages and their weights."""
    optimizer, parts = team.optimizers[agent], max(1, round(len(samples) / settings.minibatch_actions))
    for _ in range(settings.epochs):
        for part in torch.randperm(len(samples), generator=dice).tensor_split(parts):
            batch = [samples[i] for i in part.tolist()]
            new = token_logprobs(team.model, agent, [action for action, *_ in batch])
            x = torch.cat(new).detach() - torch.cat([old for _, old, _, _ in batch])
            if (x.exp() - x - 1).mean() > settings.kl_stop:  # k3, an estimate of KL that is never negative
                return  # too far from the policy that sampled: the adapter waits for fresh rollouts
            gained = [w * surrogate(n, old, a, adv, settings) for n, (a, old, adv, w) in zip(new, batch, strict=True)]
            loss = -parts * torch.stack(gained).sum()  # a minibatch stands for the whole round
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], settings.max_grad_norm)
            optimizer.step()


def update(team: Team, episodes: list[Episode], settings: Settings, dice: torch.Generator) -> None:
    """One round: advantages, then one adapter after another, then the critic (lines 14 to 18)."""
    actions = [action for episode in episodes for action in episode.actions]
    episode_of = [e for e, episode in enumerate(episodes) for _ in episode.actions]
    seen = observations(team, actions)
    values = team.critic(torch.cat(seen)).detach().split([len(each) for each in seen])
    rows, advantages = iter(values), []
    for episode in episodes:
        advantages += gae_along_dependencies(episode, [next(rows) for _ in episode.actions], settings)
    log_factor = torch.zeros(len(episodes))  # HAPPO: log pi_new / pi_old, over the actions of all agents updated so far
    for agent in team.optimizers:
        own = [i for i, action in enumerate(actions) if action.agent == agent]
        own_actions, own_episodes = [actions[i] for i in own], [episode_of[i] for i in own]
        flat = torch.cat([advantages[i] for i in own])
        normal = [(advantages[i] - flat.mean()) / (flat.std(correction=0) + 1e-6) for i in own]  # per agent: Dr. MAS
        parts = [len(set(own_episodes)) * own_episodes.count(e) for e in own_episodes]  # every episode counts the same,
        if settings.granularity == "token":  # or every token
            parts = [len(flat)] * len(own)
        factors = log_factor[own_episodes].exp().clamp(1 - settings.clip_low, 1 + settings.clip_high)  # A2PO's clip
        old = [each.detach() for each in token_logprobs(team.model, agent, own_actions)]
        samples = list(zip(own_actions, old, normal, (factors / torch.tensor(parts)).tolist(), strict=True))
        improve(team, agent, samples, settings, dice)
        new = [each.detach() for each in token_logprobs(team.model, agent, own_actions)]
        for e, n, o in zip(own_episodes, new, old, strict=True):
            log_factor[e] += log_ratio(n, o, "action", settings).item()

    targets = torch.cat([a + v[: len(a)] for a, v in zip(advantages, values, strict=True)])  # A + V
    inputs = torch.cat([o[: len(a)] for o, a in zip(seen, advantages, strict=True)])
    for _ in range(8):
        team.critic_optimizer.zero_grad()
        nn.functional.huber_loss(team.critic(inputs), targets).backward()
        team.critic_optimizer.step()


def main() -> None:
    """Plays and learns, and prints the mean reward of each round's rollouts."""
    parser = argparse.ArgumentParser(description="MARFT on a toy game")
    parser.add_argument("--granularity", choices=["action", "token"], default="action")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = Settings(granularity=arguments.granularity)
    torch.manual_seed(arguments.seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.3, **shape))  # tiny and random
    team, dice = Team(base, list(D)), torch.Generator().manual_seed(arguments.seed)
    for number in range(20):
        episodes = play(team.model, 64, dice)
        print(f"round {number:2d}   reward {sum(episode.reward for episode in episodes) / len(episodes):.3f}")
        update(team, episodes, settings, dice)


if __name__ == "__main__":
    main()
