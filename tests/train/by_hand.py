"""Every metric of an update and of an evaluation by the formulas of docs/metrics.md, in plain floats.

Goes along with the updates of ``reference``: answers one by one from forwards of one row without padding, every mean a
sum over a list of tokens or answers. Shares no code with Tether.
"""

from __future__ import annotations

import copy
import math

import torch

from tests.train import reference
from tests.train.reference import row_distributions, row_logprobs, row_values, shaped_score, token_kl


def flat(rows):
    return [x for row in rows for x in row]


def mean(numbers):
    return sum(numbers) / len(numbers)


def variance(numbers):
    centre = mean(numbers)
    return mean([(x - centre) ** 2 for x in numbers])


def floats(tensors):
    return [x.item() for x in tensors]


def entropy(distribution):
    return -sum(math.exp(log) * log for log in distribution.tolist())


def of_answers(rollouts, scores, rewards):
    """What training and evaluation alike say of answers.

    Args:
        scores: with all rules applied.
        rewards: name of each source → its own score of each answer.
    """
    return {
        "scores": mean(scores),
        "scores_std": math.sqrt(variance(scores)),
        "length": mean([len(rollout.response) for rollout in rollouts]),
        "eos_rate": mean([1.0 if rollout.ended else 0.0 for rollout in rollouts]),
    } | {f"rewards/{name}": mean(numbers) for name, numbers in rewards.items()}


class Run(reference.Run):
    """The reference, and in ``metrics`` what its last update should have logged.

    Args:
        settings: see ``reference.Settings``.
    """

    def __init__(self, policy, ref, critic, settings):
        super().__init__(policy, ref, critic, settings)
        self.metrics, self.tokens, self.norms = {}, {}, {}
        self.first_evaluated = None
        for name, optimizer in self.optimizers.items():
            optimizer.step = self.noted(optimizer, "value" if name == "value" else "policy")

    def noted(self, optimizer, name):
        step = optimizer.step

        def noted_step():
            squares = [float(p.grad.square().sum()) for p in optimizer.parameters if p.grad is not None]
            self.norms.setdefault(f"{name}/grad_norm", []).append(math.sqrt(sum(squares)))
            step()
            self.metrics["lr" if name == "policy" else f"{name}/lr"] = optimizer.adam.param_groups[0]["lr"]

        return noted_step

    def update(self, rollouts, scores, steps, demonstrations, *, rewards, sampled):
        """One update; see ``reference.Run.update``.

        Args:
            rewards: name of each source → its own score of each answer.
            sampled: log-probabilities that decoding reported of each answer, or None.
        """
        self.metrics, self.tokens, self.norms = {"objective/kl_coef": self.kl_coef}, {}, {}
        self.rewards, self.sampled = rewards, sampled
        taken = super().update(rollouts, scores, steps, demonstrations)
        self.metrics |= {"update/num_steps": taken, "update/num_bad": 0, "episode": self.updates * len(rollouts)}
        self.metrics |= {"update/num_empty": self.empty} if self.s.mask_truncated else {}
        self.metrics |= {name: mean(numbers) for name, numbers in (self.tokens | self.norms).items()}
        if "val/ratio" in self.tokens:
            ratios = self.tokens["val/ratio"]
            self.metrics |= {"val/ratio_var": variance(ratios), "val/ratio_max": max(ratios)}
        return taken

    @torch.no_grad()
    def learn(self, rollouts, scores):
        learned = super().learn(rollouts, scores)
        s, old, lengths = self.s, learned.old, [len(rollout.response) for rollout in rollouts]
        said = flat(rollout.response for rollout in rollouts)
        shaped = [shaped_score(x, rollout, self.seen_scores, s) for x, rollout in zip(scores, rollouts, strict=True)]
        seen = of_answers(rollouts, shaped, self.rewards)
        self.metrics |= {
            "objective/scores": seen.pop("scores"),
            "objective/scores_std": seen.pop("scores_std"),
            "rollout/length": seen.pop("length"),
            "rollout/eos_rate": seen.pop("eos_rate"),
            "rollout/length_max": max(lengths),
            "rollout/top_token_share": max(map(said.count, said)) / len(said),
            "rollout/top_answer_share": max(
                sum(other.response == rollout.response for other in rollouts) for rollout in rollouts
            )
            / len(rollouts),
            "tokens/rollout": sum(lengths),
            "val/num_eos_tokens": sum(rollout.ended for rollout in rollouts),
            **seen,
        }
        penalties = [0.0] * len(rollouts)
        if learned.ref is not None:
            pairs = [list(zip(*rows, strict=True)) for rows in zip(old, learned.ref, strict=True)]
            kl = {name: [sum(token_kl(*pair, name) for pair in row) for row in pairs] for name in ("k1", "k2", "k3")}
            self.metrics |= {"objective/kl": mean(kl["k1"]), "objective/kl_k3": mean(kl["k3"])}
            penalties = [-self.kl_coef * x for x in kl[s.kl_estimator]]
        if s.advantage_estimator in ("rloo", "grpo"):
            n = s.num_generations
            groups = [set(shaped[first : first + n]) for first in range(0, len(shaped), n)]
            self.metrics["objective/equal_scores"] = mean([len(group) == 1 for group in groups])
        distributions = [row_distributions(self.policy, r.query, r.response, s.temperature) for r in rollouts]
        self.metrics |= {
            "objective/non_score_reward": mean(penalties),
            "objective/rlhf_reward": mean([x + y for x, y in zip(shaped, penalties, strict=True)]),
            "objective/entropy": mean([-sum(row) for row in old]),
            "policy/entropy_avg": mean([entropy(distribution) for distribution in flat(distributions)]),
        }
        if self.sampled is not None:
            gaps = [abs(x - y) for x, y in zip(flat(self.sampled), flat(old), strict=True)]
            self.metrics["rollout/logprob_gap"] = mean(gaps)
        if learned.values is not None:
            returns, values = flat(learned.returns), flat(learned.values)
            errors = [g - v for g, v in zip(returns, values, strict=True)]
            self.metrics["val/values"] = mean(values)
            self.metrics["val/explained_variance"] = 1 - variance(errors) / variance(returns)
        return learned

    def add_gradients(self, rows, rollouts, learned):
        is_first = not self.tokens
        for i in rows:
            query, response = rollouts[i].query, rollouts[i].response
            with torch.no_grad():
                if not self.warms_up:
                    new = floats(row_logprobs(self.policy, query, response, self.s.temperature))
                    self.note_policy(new, i, learned)
        if is_first and not self.warms_up:
            self.metrics["val/first_ratio_error"] = max(abs(ratio - 1) for ratio in self.tokens["val/ratio"])
        gaps = super().add_gradients(rows, rollouts, learned)
        # A critic of its own has its turn after the policy, and none where the policy went too far.
        if self.critic is not None and (self.shares_trunk or not self.went_too_far(gaps)):
            for i in rows:
                with torch.no_grad():
                    values = floats(row_values(*self.critic, rollouts[i].query, rollouts[i].response))
                self.note_critic(values, i, learned)
        return gaps

    def note(self, **numbers):
        for name, number in numbers.items():
            self.tokens.setdefault(name.replace("__", "/"), []).append(float(number))

    def note_policy(self, new, i, learned):
        s = self.s
        low, high = 1 - s.cliprange, 1 + (s.cliprange if s.cliprange_high is None else s.cliprange_high)
        for t, (log_new, log_old, a) in enumerate(zip(new, learned.old[i], learned.advantages[i], strict=True)):
            rho = math.exp(log_new - log_old)
            loss = max(-a * rho, -a * min(max(rho, low), high))
            if s.dual_clip is not None:
                self.note(policy__dual_clipfrac=a < 0 and rho > s.dual_clip)
                loss = min(loss, -a * s.dual_clip) if a < 0 else loss
            self.note(
                loss__policy_avg=loss,
                policy__approxkl_avg=rho - 1 - math.log(rho),
                policy__clipfrac_avg=(a < 0 and rho < low) or (a > 0 and rho > high),
                policy__clipfrac_low=a < 0 and rho < low,
                policy__clipfrac_high=a > 0 and rho > high,
                val__ratio=rho,
            )
            if s.kl_in == "loss":
                self.note(loss__kl_avg=rho * token_kl(log_new, learned.ref[i][t], s.kl_estimator))

    def note_critic(self, new, i, learned):
        limit = math.inf if self.s.cliprange_value is None else self.s.cliprange_value
        for v_new, v_old, target in zip(new, learned.values[i], learned.returns[i], strict=True):
            plain = (v_new - target) ** 2
            limited = (min(max(v_new, v_old - limit), v_old + limit) - target) ** 2
            self.note(loss__value_avg=max(plain, limited) / 2, val__clipfrac_avg=limited > plain)

    def imitate(self, demonstrations):
        for query, response in demonstrations:
            with torch.no_grad():
                for log in floats(row_logprobs(self.policy, query, response, 1.0)):
                    self.note(loss__ptx_avg=-log)
        super().imitate(demonstrations)

    @torch.no_grad()
    def evaluation(self, rollouts, scores, rewards):
        """What an evaluation whose answers are ``rollouts`` should log, whatever the run did before it."""
        s, seen = self.s, self.seen_scores
        if s.score_norm == "running":
            seen = self.first_evaluated = self.first_evaluated or list(scores)
        shaped = [shaped_score(x, rollout, seen, s) for x, rollout in zip(scores, rollouts, strict=True)]
        policy = self.policy
        if s.ema_decay is not None:
            policy = copy.deepcopy(policy)
            policy.load_state_dict(self.average, strict=False)
        metrics = {f"eval_{name}": number for name, number in of_answers(rollouts, shaped, rewards).items()}
        for name, numbers in rewards.items():
            metrics[f"eval_rewards_std/{name}"] = math.sqrt(variance(numbers))
        if self.reference is not None:
            sums = []
            for rollout in rollouts:
                new, ref = (
                    floats(row_logprobs(model, rollout.query, rollout.response, s.temperature))
                    for model in (policy, self.reference)
                )
                sums.append(sum(new) - sum(ref))
            metrics["eval_kl"] = mean(sums)
        return metrics
