"""PPO updates written a second time: rows one by one, no padding, plain floats. Shares no code with Tether.

Slow and explicit on purpose. Every sum is a loop over the tokens of one answer, so that a mask, a mean or a shift that
is wrong in the trainer cannot be wrong here in the same way. Decides nothing about order: it is told which rows and
which demonstrations an optimizer step has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Settings:
    """The trainer's settings under their names in its configuration, no default left open."""

    # the algorithm
    kl_coef: float
    kl_in: str
    kl_estimator: str
    kl_target: float | None
    kl_horizon: int
    num_ppo_epochs: int
    num_mini_batches: int
    max_approx_kl: float | None
    max_ratio: float | None
    cliprange: float
    cliprange_high: float | None
    dual_clip: float | None
    importance_sampling_cap: float | None
    cliprange_value: float | None
    vf_coef: float
    entropy_coef: float
    loss_reduction: str
    ptx_coef: float
    gamma: float
    advantage_estimator: str
    lam: float
    value_lam: float | None
    lam_alpha: float | None
    whiten_rewards: bool
    whiten_advantages: bool
    advantage_clip: float | None
    score_norm: str | None
    reward_clip: float | None
    missing_eos_penalty: float | None
    missing_eos_score: float | None
    overlong_buffer: int | None
    overlong_penalty: float
    mask_truncated: bool
    # the rest of the run
    num_generations: int
    response_length: int
    temperature: float
    learning_rate: float
    value_learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float | None
    ema_decay: float | None
    warmup_steps: int
    detach: bool
    num_updates: int


@dataclass
class Rollout:
    query: list[int]
    response: list[int]
    ended: bool
    drawn: list[float] | None = None
    """What another engine drew each response token with, as log-probabilities; None if the policy itself did."""


@dataclass
class Learned:
    """What an update learns from; a list of lists has one number a response token, row by row."""

    kept: list[bool]
    old: list[list[float]]
    ref: list[list[float]] | None
    values: list[list[float]] | None
    advantages: list[list[float]]
    advantage_std: float
    returns: list[list[float]] | None


# What the models say


def row_distributions(model, query, response, temperature):
    """log π of every token of the vocabulary, in the state in which each response token was sampled."""
    logits = model(torch.tensor([query + response])).logits[0]
    return [torch.log_softmax(logits[len(query) - 1 + t] / temperature, -1) for t in range(len(response))]


def row_logprobs(model, query, response, temperature):
    distributions = row_distributions(model, query, response, temperature)
    return [distribution[token] for distribution, token in zip(distributions, response, strict=True)]


def row_values(trunk, head_weight, query, response, *, detach=False):
    hidden = trunk(torch.tensor([query + response])).last_hidden_state[0]
    if detach:
        hidden = hidden.detach()
    return [(hidden[len(query) - 1 + t] * head_weight).sum() for t in range(len(response))]


# From scores to advantages


def mean_and_var(numbers):
    mean = sum(numbers) / len(numbers)
    return mean, sum((x - mean) ** 2 for x in numbers) / len(numbers)


def shaped_score(score, rollout, seen, s):
    """Normalised, clipped, changed if the answer did not end, and if it is overlong; in this order."""
    if s.score_norm is not None:
        mean, var = mean_and_var(seen)
        score = (score - mean) / math.sqrt(var + 1e-8)
    if s.reward_clip is not None:
        score = min(max(score, -s.reward_clip), s.reward_clip)
    if not rollout.ended and s.missing_eos_penalty is not None:
        score -= s.missing_eos_penalty
    if not rollout.ended and s.missing_eos_score is not None:
        score = s.missing_eos_score
    if s.overlong_buffer is not None:
        tokens_inside = len(rollout.response) - (s.response_length - s.overlong_buffer)
        if tokens_inside > 0:
            score -= s.overlong_penalty * tokens_inside / s.overlong_buffer
    return score


def token_kl(old, ref, estimator):
    match estimator:
        case "k1":
            return old - ref
        case "k2":
            return (old - ref) ** 2 / 2
        case "k3":
            return math.exp(ref - old) - 1 - (ref - old)


def early_scores(token_scores, rollouts, seen, s):
    """What of each answer's score falls before its last token: the judge's own numbers, scaled as scores are."""
    std = 1.0 if s.score_norm is None else math.sqrt(mean_and_var(seen)[1] + 1e-8)
    rows = []
    for row, rollout in zip(token_scores, rollouts, strict=True):
        is_replaced = s.missing_eos_score is not None and not rollout.ended
        rows.append([0.0 if is_replaced else x / std for x in row[:-1]])
    return rows


def token_rewards(scores, early, kl, kl_coef):
    rewards = [[-kl_coef * k for k in row] for row in kl]
    for row, parts, score in zip(rewards, early, scores, strict=True):
        for t, part in enumerate(parts):
            row[t] += part
        row[-1] += score - sum(parts)
    return rewards


def generalized(rewards, values, gamma, lam):
    """Σ_k (γ λ)^k δ_{t+k} of one row, where nothing comes after the last token."""
    n = len(rewards)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, n)) for t in range(n)]


def policy_lam(length, s):
    return s.lam if s.lam_alpha is None else max(0.0, 1 - 1 / (s.lam_alpha * length))


def critic_lam(s):
    return s.lam if s.value_lam is None else s.value_lam


def group_advantages(rewards, scores, s):
    """One number an answer, against the other answers to its prompt, on each of its tokens."""
    totals = [sum(row) for row in rewards]
    rows = []
    for i, total in enumerate(totals):
        first = i - i % s.num_generations
        group = totals[first : first + s.num_generations]
        if s.advantage_estimator == "rloo":
            advantage = total - (sum(group) - total) / (len(group) - 1)
        else:
            judged = scores[first : first + s.num_generations]
            mean = sum(judged) / len(judged)
            std = math.sqrt(sum((x - mean) ** 2 for x in judged) / (len(judged) - 1))
            kl_of_others = [x - y for x, y in zip(group, judged, strict=True)]
            advantage = (scores[i] - mean) / (std + 1e-4) + total - scores[i] - sum(kl_of_others) / len(group)
        rows.append([advantage] * len(rewards[i]))
    return rows


def advantages_of(rewards, values, scores, s):
    match s.advantage_estimator:
        case "gae":
            return [
                generalized(row, row_values, s.gamma, policy_lam(len(row), s))
                for row, row_values in zip(rewards, values, strict=True)
            ]
        case "rloo" | "grpo":
            return group_advantages(rewards, scores, s)
        case "reinforce_pp":
            return [
                [sum(s.gamma ** (j - t) * row[j] for j in range(t, len(row))) for t in range(len(row))]
                for row in rewards
            ]


def returns_of(rewards, values, s):
    return [
        [a + v for a, v in zip(generalized(row, row_values, s.gamma, critic_lam(s)), row_values, strict=True)]
        for row, row_values in zip(rewards, values, strict=True)
    ]


def scale_of(rows):
    mean, var = mean_and_var([x for row in rows for x in row])
    return mean, math.sqrt(var + 1e-8)


# Losses of one token


def token_policy_loss(new, old, advantage, s):
    ratio = torch.exp(new - old)
    low = 1 - s.cliprange
    high = 1 + (s.cliprange if s.cliprange_high is None else s.cliprange_high)
    bounded = ratio if low <= ratio.item() <= high else torch.tensor(low if ratio.item() < low else high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if s.dual_clip is not None and advantage < 0:
        gain = torch.maximum(gain, torch.tensor(s.dual_clip * advantage))
    return -gain


def importance(drawn, old, s):
    """How much the loss of a token counts that another engine drew with log-probability ``drawn``."""
    return min(math.exp(old - drawn), s.importance_sampling_cap)


def token_kl_loss(new, old, ref, s):
    """KL(π_new ‖ ref) from a token that π_old sampled."""
    ratio = torch.exp(new - old)
    match s.kl_estimator:
        case "k1":
            return ratio * (new - ref)
        case "k2":
            return ratio.item() * (new - ref) ** 2 / 2
        case "k3":
            return ratio * (torch.exp(ref - new) - 1 - (ref - new))


def token_value_loss(new, old, target, s):
    plain = (new - target) ** 2
    if s.cliprange_value is None:
        return 0.5 * plain
    move = new - old
    limit = s.cliprange_value
    near = new if abs(move.item()) <= limit else torch.tensor(old + math.copysign(limit, move.item()))
    return 0.5 * torch.maximum(plain, (near - target) ** 2)


def token_weight(length, lengths, s):
    """What a token of an answer of ``length`` tokens counts among answers of ``lengths``."""
    match s.loss_reduction:
        case "token_mean":
            return 1 / sum(lengths)
        case "sequence_mean":
            return 1 / (len(lengths) * length)
        case "fixed_length":
            return 1 / (len(lengths) * s.response_length)


# The run


class LinearAdam:
    """AdamW on gradients clipped by their norm; the learning rate falls in a line to 0 over ``num_steps``."""

    def __init__(self, parameters, rate, num_steps, s):
        self.parameters, self.rate, self.num_steps, self.s = parameters, rate, num_steps, s
        betas = s.adam_beta1, s.adam_beta2
        self.adam = torch.optim.AdamW(parameters, rate, betas, s.adam_epsilon, s.weight_decay)
        self.done = 0

    def step(self):
        self.adam.param_groups[0]["lr"] = self.rate * (1 - self.done / self.num_steps)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
        for grad in grads:
            if self.s.max_grad_norm is not None:
                grad *= min(1.0, self.s.max_grad_norm / (norm + 1e-6))
        self.adam.step()
        self.skip()

    def skip(self):
        self.adam.zero_grad()
        self.done += 1


class Run:
    """Updates of ``policy``, and of the critic if there is one, in place.

    Args:
        critic: its trunk, which may be the policy's own, and the weight of its head; None without one.
    """

    def __init__(self, policy, reference, critic, s):
        self.policy, self.reference, self.critic, self.s = policy, reference, critic, s
        self.shares_trunk = critic is not None and critic[0] is policy.base_model
        self.kl_coef, self.updates, self.seen_scores = s.kl_coef, 0, []
        self.average = {name: p.detach().clone() for name, p in policy.named_parameters()}
        per_update, own = s.num_ppo_epochs * s.num_mini_batches, list(policy.parameters())
        if critic is None:
            self.optimizers = {"policy": LinearAdam(own, s.learning_rate, s.num_updates * per_update, s)}
        elif self.shares_trunk:
            both = [*own, critic[1]]
            self.optimizers = {"both": LinearAdam(both, s.learning_rate, s.num_updates * per_update, s)}
        else:
            later, critics = s.num_updates - s.warmup_steps, [*critic[0].parameters(), critic[1]]
            self.optimizers = {
                "policy": LinearAdam(own, s.learning_rate, later * per_update, s),
                "value": LinearAdam(critics, s.value_learning_rate, s.num_updates * per_update, s),
            }

    @property
    def warms_up(self):
        return self.updates < self.s.warmup_steps

    def update(self, rollouts, scores, steps, demonstrations):
        """One update. Returns how many optimizer steps it took.

        Args:
            scores: of each rollout, as the reward says: a number, or one for each token.
            steps: rows of each optimizer step.
            demonstrations: (query, response) pairs of each optimizer step, if any.
        """
        learned = self.learn(rollouts, scores)
        used = {name: optimizer for name, optimizer in self.optimizers.items() if not self.warms_up or name != "policy"}
        taken, stopped, self.empty = 0, False, 0
        for number, rows in enumerate(steps):
            kept = [i for i in rows if learned.kept[i]]
            is_empty = not kept and (not demonstrations or self.warms_up)
            if not stopped:
                gaps = self.add_gradients(kept, rollouts, learned)
                if demonstrations and not self.warms_up:
                    self.imitate(demonstrations[number])
                stopped = self.went_too_far(gaps)
            if self.warms_up:
                for p in self.policy.parameters():
                    p.grad = None
            for optimizer in used.values():
                if stopped or is_empty:
                    optimizer.skip()
                else:
                    optimizer.step()
            taken += not (stopped or is_empty)
            self.empty += is_empty and not stopped
        self.steer_kl(learned)
        if self.s.ema_decay is not None and not self.warms_up:
            for name, p in self.policy.named_parameters():
                self.average[name] = self.s.ema_decay * self.average[name] + (1 - self.s.ema_decay) * p.detach()
        self.updates += 1
        return taken

    @torch.no_grad()
    def learn(self, rollouts, scores):
        s, texts = self.s, [(rollout.query, rollout.response) for rollout in rollouts]
        parts = [[0.0] * (len(rollout.response) - 1) + [x] for x, rollout in zip(scores, rollouts, strict=True)]
        if any(isinstance(x, list) for x in scores):
            parts, scores = scores, [sum(x) for x in scores]
        if s.score_norm == "running":
            self.seen_scores += scores
        early = early_scores(parts, rollouts, self.seen_scores, s)
        scores = [shaped_score(x, rollout, self.seen_scores, s) for x, rollout in zip(scores, rollouts, strict=True)]
        kept = [rollout.ended or not s.mask_truncated for rollout in rollouts]
        old = [[x.item() for x in row_logprobs(self.policy, *text, s.temperature)] for text in texts]
        ref = values = returns = None
        kl = [[0.0] * len(row) for row in old]
        if self.reference is not None:
            ref = [[x.item() for x in row_logprobs(self.reference, *text, s.temperature)] for text in texts]
            pairs = [zip(a, b, strict=True) for a, b in zip(old, ref, strict=True)]
            kl = [[token_kl(a, b, s.kl_estimator) for a, b in pair] for pair in pairs]
        if self.critic is not None:
            values = [[x.item() for x in row_values(*self.critic, *text)] for text in texts]
        rewards = token_rewards(scores, early, kl, self.kl_coef if s.kl_in == "reward" else 0.0)
        if s.whiten_rewards:
            mean, std = scale_of(rewards)
            rewards = [[(x - mean) / std + mean for x in row] for row in rewards]
        advantages, std = advantages_of(rewards, values, scores, s), 1.0
        if self.critic is not None:
            returns = returns_of(rewards, values, s)
        if s.whiten_advantages:
            mean, std = scale_of([row for row, is_kept in zip(advantages, kept, strict=True) if is_kept])
            advantages = [[(x - mean) / std for x in row] for row in advantages]
        if s.advantage_clip is not None:
            advantages = [[min(max(x, -s.advantage_clip), s.advantage_clip) for x in row] for row in advantages]
        return Learned(kept, old, ref, values, advantages, std, returns)

    def add_gradients(self, rows, rollouts, learned):
        """The gradient of the loss over ``rows``. Returns log π_new − log π_old of each of their tokens."""
        s, gaps = self.s, []
        lengths = [len(rollouts[i].response) for i in rows]
        for i in rows:
            query, response = rollouts[i].query, rollouts[i].response
            loss = torch.tensor(0.0)
            if not self.warms_up:
                distributions = row_distributions(self.policy, query, response, s.temperature)
                for t, token in enumerate(response):
                    new, old = distributions[t][token], learned.old[i][t]
                    gaps.append(new.item() - old)
                    drawn = rollouts[i].drawn
                    weight = 1.0 if drawn is None else importance(drawn[t], old, s)
                    loss = loss + weight * token_policy_loss(new, old, learned.advantages[i][t], s)
                    if s.kl_in == "loss" and learned.ref is not None:
                        weight = self.kl_coef / learned.advantage_std
                        loss = loss + weight * token_kl_loss(new, old, learned.ref[i][t], s)
                    entropy = -(distributions[t].exp() * distributions[t]).sum()
                    loss = loss - s.entropy_coef * entropy
            if self.critic is not None:
                new_values = row_values(*self.critic, query, response, detach=s.detach)
                for t in range(len(response)):
                    value_loss = token_value_loss(new_values[t], learned.values[i][t], learned.returns[i][t], s)
                    loss = loss + (s.vf_coef if self.shares_trunk else 1.0) * value_loss
            (loss * token_weight(len(response), lengths, s)).backward()
        return gaps

    def imitate(self, demonstrations):
        """The gradient of the SFT loss, at temperature 1 whatever answers are sampled at."""
        count = sum(len(response) for _, response in demonstrations)
        for query, response in demonstrations:
            loss = -sum(row_logprobs(self.policy, query, response, 1.0))
            (self.s.ptx_coef * loss / count).backward()

    def went_too_far(self, gaps):
        if not gaps:
            return False
        approx_kl = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
        ratio = sum(math.exp(gap) for gap in gaps) / len(gaps)
        s = self.s
        return (s.max_approx_kl is not None and approx_kl > s.max_approx_kl) or (
            s.max_ratio is not None and ratio > s.max_ratio
        )

    def steer_kl(self, learned):
        if self.s.kl_target is None or self.warms_up:
            return
        sequences = [sum(old) - sum(ref) for old, ref in zip(learned.old, learned.ref, strict=True)]
        error = sum(sequences) / len(sequences) / self.s.kl_target - 1
        self.kl_coef *= 1 + min(max(error, -0.2), 0.2) * len(sequences) / self.s.kl_horizon
