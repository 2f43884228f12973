"""One PPO update written a second time: rows one by one, no padding, plain floats. Shares no code with Tether.

Slow and explicit on purpose. Every sum is a loop over the tokens of one answer, so that a mask, a mean or a shift that
is wrong in the trainer cannot be wrong here in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Settings:
    kl_coef: float
    kl_estimator: str
    epochs: int
    cliprange: float
    cliprange_value: float | None
    vf_coef: float
    gamma: float
    lam: float
    temperature: float
    whiten_advantages: bool
    whiten_rewards: bool
    learning_rate: float
    max_grad_norm: float


def row_logprobs(model, query, response, temperature):
    logits = model(torch.tensor([query + response])).logits[0]
    return [torch.log_softmax(logits[len(query) - 1 + t] / temperature, -1)[token] for t, token in enumerate(response)]


def row_values(backbone, head_weight, query, response):
    hidden = backbone(torch.tensor([query + response])).last_hidden_state[0]
    return [(hidden[len(query) - 1 + t] * head_weight).sum() for t in range(len(response))]


def scaled(rows, *, keep_mean):
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / len(flat) + 1e-8)
    return [[(x - mean) / std + (mean if keep_mean else 0.0) for x in row] for row in rows]


def advantages_and_returns(scores, kl, values, s):
    rewards = [[-s.kl_coef * k for k in row] for row in kl]
    for row, score in zip(rewards, scores, strict=True):
        row[-1] += score
    if s.whiten_rewards:
        rewards = scaled(rewards, keep_mean=True)
    advantages, returns = [], []
    for reward, value in zip(rewards, values, strict=True):
        n = len(reward)
        deltas = [reward[t] + (s.gamma * value[t + 1] if t + 1 < n else 0.0) - value[t] for t in range(n)]
        row = [sum((s.gamma * s.lam) ** (j - t) * deltas[j] for j in range(t, n)) for t in range(n)]
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, value, strict=True)])
    if s.whiten_advantages:
        advantages = scaled(advantages, keep_mean=False)
    return advantages, returns


def token_policy_loss(new, old, advantage, s):
    ratio = torch.exp(new - old)
    low, high = 1 - s.cliprange, 1 + s.cliprange
    bounded = ratio if low <= ratio.item() <= high else torch.tensor(low if ratio.item() < low else high)
    return -torch.minimum(ratio * advantage, bounded * advantage)


def token_value_loss(new, old, target, s):
    plain = (new - target) ** 2
    if s.cliprange_value is None:
        return 0.5 * plain
    move = new - old
    limit = s.cliprange_value
    near = new if abs(move.item()) <= limit else torch.tensor(old + math.copysign(limit, move.item()))
    return 0.5 * torch.maximum(plain, (near - target) ** 2)


def update(policy, reference, backbone, head_weight, rollouts, scores, s, *, shared):
    """Trains ``policy`` (and critic) in place on ``rollouts``, a list of (query, response) token lists.

    ``shared``: the critic is a head on the policy, one optimizer for both; else ``backbone`` and head have their own.
    """
    with torch.no_grad():
        old = [[x.item() for x in row_logprobs(policy, q, r, s.temperature)] for q, r in rollouts]
        ref = [[x.item() for x in row_logprobs(reference, q, r, s.temperature)] for q, r in rollouts]
        values = [[x.item() for x in row_values(backbone, head_weight, q, r)] for q, r in rollouts]
    gaps = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(old, ref, strict=True)]
    kl = [[g if s.kl_estimator == "k1" else math.exp(-g) - 1 + g for g in row] for row in gaps]
    advantages, returns = advantages_and_returns(scores, kl, values, s)
    count = sum(len(r) for _, r in rollouts)
    groups = [list(policy.parameters())]
    critic = [head_weight] if shared else [*backbone.parameters(), head_weight]
    groups = [groups[0] + critic] if shared else [groups[0], critic]
    optimizers = [torch.optim.AdamW(g, lr=s.learning_rate, eps=1e-5, weight_decay=0.0) for g in groups]
    for epoch in range(s.epochs):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = s.learning_rate * (1 - epoch / s.epochs)
            optimizer.zero_grad()
        for i, (query, response) in enumerate(rollouts):
            new = row_logprobs(policy, query, response, s.temperature)
            new_values = row_values(backbone, head_weight, query, response)
            for t in range(len(response)):
                policy_loss = token_policy_loss(new[t], old[i][t], advantages[i][t], s)
                value_loss = token_value_loss(new_values[t], values[i][t], returns[i][t], s)
                total = policy_loss + (s.vf_coef if shared else 1.0) * value_loss
                (total / count).backward(retain_graph=True)
        for group, optimizer in zip(groups, optimizers, strict=True):
            norm = math.sqrt(sum(float((p.grad**2).sum()) for p in group if p.grad is not None))
            if norm > s.max_grad_norm:
                for p in group:
                    if p.grad is not None:
                        p.grad *= s.max_grad_norm / (norm + 1e-6)
            optimizer.step()
