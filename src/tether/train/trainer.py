"""Proximal policy optimization of a language model. One update reads top to bottom in ``PPOTrainer.step``.

    rollout      the policy answers a batch of prompts
    score        reward sources judge the answers
    experience   log-probabilities, values and the KL to the reference become advantages and returns
    update       clipped policy and value losses over several epochs of mini-batches

Formulas live in ``tether.algo``; which model plays which role is known to ``tether.models.roles`` alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tether import algo
from tether.config.schema import RunConfig
from tether.data.collate import collate, plan_micro_batches
from tether.data.stream import PromptStream
from tether.metrics.reduce import Metrics
from tether.models.forward import LogprobOutput
from tether.train.callbacks import Callbacks
from tether.train.checkpoint import Checkpoints, RunState
from tether.train.distributed import Dist
from tether.train.evaluate import evaluate
from tether.train.guard import check_finite, check_gradients, suspicions
from tether.train.interrupt import Stopped, StopRequest
from tether.train.log import RunLog
from tether.train.optim import build_optimizers
from tether.train.parts import Parts
from tether.train.rollout import Answers, answer, judge
from tether.types import Experience, MicroBatch, Request, noise_key


class PPOTrainer:
    """Trains ``parts.roles.policy`` to please ``parts.rewards``.

    Args:
        config: the run's configuration.
        parts: models, reward sources and prompts.
        dist: device and processes.
        log: where metrics, samples and progress go.
        callbacks: told of every event; one step is one update.
    """

    def __init__(self, config: RunConfig, parts: Parts, *, dist: Dist, log: RunLog, callbacks: Callbacks) -> None:
        self.config, self.parts, self.roles, self.dist, self.log = config, parts, parts.roles, dist, log
        self.num_updates = config.num_updates(len(parts.prompts))
        self.stream = PromptStream(len(parts.prompts), config.train.rollout_batch_size, config.train.seed)
        self.optimizers = build_optimizers(config, parts.roles, self.num_updates)
        self.checkpoints = Checkpoints(config, parts.roles, parts.tokenizer, self.optimizers)
        self.callbacks = callbacks
        self.callbacks.attach(parts.roles.policy, parts.tokenizer)
        self.state = RunState(kl_coef=config.ppo.kl_coef)
        self.stop = StopRequest(config.train.max_runtime)

    # The run

    def fit(self) -> str | None:
        """Trains to the last update. Returns None, or why the run stopped early with its state saved."""
        self.callbacks.train_begin()
        self.log.display.update(self.state.step, self.num_updates, {})
        try:
            with self.stop:
                if self.state.evaluated_step != self.state.step and self.evaluation_due():
                    self.evaluate()  # before the first update, or where the run that goes on was stopped
                while self.state.step < self.num_updates and not self.callbacks.stop_requested:
                    self.train_one_update()
                if self.state.evaluated_step != self.state.step:
                    self.evaluate()
        except Stopped as stopped:
            self.save()
            return str(stopped)
        if self.config.train.load_best_model_at_end and self.state.best_step is not None:
            self.checkpoints.restore_roles(self.state.best_step)
        self.callbacks.train_end()
        return None

    def train_one_update(self) -> None:
        """One update with everything that may follow it: logging, evaluation, a checkpoint."""
        self.callbacks.step_begin()
        metrics = self.step()
        self.state.step += 1
        for text in suspicions(metrics):
            self.log.warn_once(text)
        self.log.update(self.state.step, self.num_updates, metrics)
        self.callbacks.step_end(metrics)
        if self.evaluation_due():
            self.evaluate()
        if self.callbacks.due("save", self.config.train.save_steps) and self.state.saved_step != self.state.step:
            self.save()

    def evaluation_due(self) -> bool:
        """Whether an evaluation belongs here: before the first update, by schedule, or asked for by a callback."""
        return self.state.step == 0 or self.callbacks.due("evaluate", self.config.train.eval_steps)

    def evaluate(self) -> None:
        """Answers and scores the held-out prompts; the best result so far is saved if the run keeps the best."""
        if not self.parts.eval_prompts:
            return
        metrics, samples = evaluate(self.parts, self.config, phase=self.log.phase, check=self.stop.check)
        self.state.evaluated_step = self.state.step
        is_best = self.state.note_evaluation(metrics, self.config.train)
        self.log.evaluation(self.state.step, metrics, samples)
        self.callbacks.evaluated(metrics)
        if is_best:
            self.save()

    def save(self) -> None:
        """Writes checkpoint-N, complete or not at all, and drops those beyond the limit."""
        path = self.checkpoints.save(self.state)
        self.callbacks.saved(path)

    # One update

    def step(self) -> dict[str, float]:
        """Runs one update; returns its metrics."""
        metrics = Metrics()
        with timed(metrics, "step"):
            answers = self.rollout(metrics)
            scores = self.score(answers, metrics)
            experience = self.experience(answers, scores, metrics)
            self.update(experience, answers, metrics)
            self.parts.generator.sync_weights(self.roles.policy)
        values = self.summary(metrics)
        self.steer_kl(values)
        return values

    def rollout(self, metrics: Metrics) -> Answers:
        """The policy's answers to this update's prompts."""
        draws = self.stream.batch(self.state.step)
        prompts = [self.parts.prompts[i] for i, _ in draws]
        requests = [
            Request(prompt.token_ids, noise_key(self.config.train.seed, "train", prompt.row, sample))
            for prompt, (_, sample) in zip(prompts, draws, strict=True)
        ]
        with timed(metrics, "rollout"):
            answers = answer(self.parts, prompts, requests, phase=self.log.phase, check=self.stop.check)
        for completion in answers.completions:
            metrics.mean("rollout/length", float(len(completion.token_ids)))
            metrics.max("rollout/length_max", float(len(completion.token_ids)))
            metrics.mean("rollout/eos_rate", float(completion.finish_reason == "stop"))
            metrics.sum("val/num_eos_tokens", float(completion.finish_reason == "stop"))
            metrics.sum("tokens/rollout", float(len(completion.token_ids)))
        return answers

    def score(self, answers: Answers, metrics: Metrics) -> Tensor:
        """One score an answer, [B] float32, the rule for answers that did not end applied."""
        with timed(metrics, "reward"):
            judged = judge(self.parts, answers, self.config.ppo)
        metrics.mean("objective/scores", judged.scores)
        metrics.var("objective/scores_var", judged.scores)
        for name, values in judged.components.items():
            metrics.mean(f"rewards/{name}", torch.tensor(values))
        self.log.samples(self.state.step + 1, "train", answers, judged, limit=self.config.train.log_samples)
        self.stop.check()
        return judged.scores

    @torch.no_grad()
    def experience(self, answers: Answers, scores: Tensor, metrics: Metrics) -> list[Experience]:
        """Everything the update needs, a record for each micro-batch."""
        ppo, temperature = self.config.ppo, self.config.sampling.temperature
        batches = self.micro_batches(answers)
        old, rewards = [], []
        with timed(metrics, "logprobs"):
            for done, batch in enumerate(batches):
                self.log.phase("log-probabilities", done, len(batches))
                self.stop.check()
                out = self.roles.score_pass(batch, temperature)
                kl = self.kl_to_reference(batch, out, metrics)
                check_finite(self.config.output_dir, answers, batch, logprobs=out.logprobs, values=out.values, kl=kl)
                batch_scores = scores[list(batch.rows)].to(kl)
                old.append(out)
                rewards.append(algo.token_rewards(batch_scores, kl, batch.response_mask, kl_coef=self.state.kl_coef))
                self.note_objective(batch, out, kl, batch_scores, answers, metrics)
        masks = [batch.response_mask for batch in batches]
        if ppo.whiten_rewards:
            rewards = whiten_together(rewards, masks, keep_mean=True)
        estimates = [
            algo.gae(reward, out.values, mask, gamma=ppo.gamma, lam=ppo.lam)
            for reward, out, mask in zip(rewards, old, masks, strict=True)
        ]
        advantages, returns = [a for a, _ in estimates], [g for _, g in estimates]
        if ppo.whiten_advantages:
            advantages = whiten_together(advantages, masks, keep_mean=False)
        for batch, out, target in zip(batches, old, returns, strict=True):
            metrics.var("val/returns_var", target, batch.response_mask)
            metrics.var("val/residual_var", target - out.values, batch.response_mask)
        return [
            Experience(batch, out.logprobs, out.values, advantage, target)
            for batch, out, advantage, target in zip(batches, old, advantages, returns, strict=True)
        ]

    def update(self, experience: list[Experience], answers: Answers, metrics: Metrics) -> None:
        """Several epochs of mini-batches; each mini-batch is one optimizer step."""
        ppo = self.config.ppo
        total, done = ppo.num_ppo_epochs * ppo.num_mini_batches, 0
        with timed(metrics, "update"):
            for epoch in range(ppo.num_ppo_epochs):
                for mini_batch in self.mini_batches(experience, epoch):
                    self.log.phase("update", done, total)
                    num_tokens = self.dist.sum(
                        torch.tensor(float(sum(item.batch.num_response_tokens for item in mini_batch)))
                    )
                    for item in mini_batch:
                        self.accumulate(item, num_tokens, answers, metrics, is_first=done == 0)
                    check_gradients(self.config.output_dir, self.optimizers, answers, mini_batch)
                    metrics.value("lr", self.optimizers[0].learning_rate)
                    for optimizer in self.optimizers:
                        metrics.mean(f"{optimizer.name}/grad_norm", optimizer.clip())
                        optimizer.step()
                    done += 1

    def accumulate(
        self, item: Experience, num_tokens: Tensor, answers: Answers, metrics: Metrics, *, is_first: bool
    ) -> None:
        """Adds the gradient of one micro-batch's share of the mini-batch loss."""
        for pass_ in self.roles.passes:
            with pass_(item.batch, temperature=self.config.sampling.temperature) as new:
                losses = self.losses(new, item, metrics, is_first=is_first)
                check_finite(self.config.output_dir, answers, item.batch, **losses)
                is_shared = len(pass_.trains) > 1
                weights = {"policy_loss": 1.0, "value_loss": self.config.ppo.vf_coef if is_shared else 1.0}
                total = sum(weights[name] * algo.masked_sum(x, item.batch.response_mask) for name, x in losses.items())
                self.dist.backward(total / num_tokens.to(total.device))

    def losses(
        self, new: LogprobOutput, old: Experience, metrics: Metrics, *, is_first: bool
    ) -> dict[str, Tensor]:
        """Per-token losses, [M, R], of what this pass computed."""
        ppo, mask, losses = self.config.ppo, old.batch.response_mask, {}
        if new.logprobs is not None:
            losses["policy_loss"] = algo.policy_loss(
                new.logprobs, old.logprobs, old.advantages, cliprange=ppo.cliprange
            )
            self.note_policy(new.logprobs.detach(), old, metrics, is_first=is_first)
            metrics.mean("loss/policy_avg", losses["policy_loss"].detach(), mask)
        if new.values is not None:
            losses["value_loss"] = algo.value_loss(
                new.values, old.values, old.returns, cliprange_value=ppo.cliprange_value
            )
            clipped = algo.value_clipped(
                new.values.detach(), old.values, old.returns, cliprange_value=ppo.cliprange_value
            )
            metrics.mean("loss/value_avg", losses["value_loss"].detach(), mask)
            metrics.mean("val/clipfrac_avg", clipped, mask)
        return losses

    # Parts of an update

    def micro_batches(self, answers: Answers) -> list[MicroBatch]:
        """The rollout batch in padded micro-batches, formed once: every pass of this update uses the same ones."""
        queries = [prompt.token_ids for prompt in answers.prompts]
        responses = [completion.token_ids for completion in answers.completions]
        plan = plan_micro_batches(
            [len(q) for q in queries], [len(r) for r in responses], self.config.train.micro_batch_size
        )
        return [
            collate([queries[i] for i in rows], [responses[i] for i in rows], rows).to(self.dist.device)
            for rows in plan
        ]

    def mini_batches(self, experience: list[Experience], epoch: int) -> Iterator[list[Experience]]:
        """The micro-batches of one epoch, freshly shuffled, in equal groups; one group is one optimizer step."""
        seed = noise_key(self.config.train.seed, "shuffle", self.state.step, epoch)
        order = torch.randperm(len(experience), generator=torch.Generator().manual_seed(seed)).tolist()
        size = len(experience) // self.config.ppo.num_mini_batches
        for start in range(0, len(order), size):
            yield [experience[i] for i in order[start : start + size]]

    def kl_to_reference(self, batch: MicroBatch, out: LogprobOutput, metrics: Metrics) -> Tensor:
        """Per-token KL estimate, [M, R]; zeros where the coefficient is 0, without a reference forward."""
        if not self.roles.has_reference:
            return torch.zeros_like(out.logprobs)
        ref = self.roles.ref_logprobs(batch, self.config.sampling.temperature)
        kl = {name: algo.kl_estimate(out.logprobs, ref, name) for name in ("k1", "k3")}
        for name, key in (("k1", "objective/kl"), ("k3", "objective/kl_k3")):
            metrics.mean(key, algo.masked_sum(kl[name], batch.response_mask, dim=1))
        return kl[self.config.ppo.kl_estimator]

    def note_objective(
        self, batch: MicroBatch, out: LogprobOutput, kl: Tensor, scores: Tensor, answers: Answers, metrics: Metrics
    ) -> None:
        """Metrics of the rollout, TRL's names where TRL had one."""
        mask = batch.response_mask
        penalty = -self.state.kl_coef * algo.masked_sum(kl, mask, dim=1)
        metrics.mean("objective/entropy", -algo.masked_sum(out.logprobs, mask, dim=1))
        metrics.mean("objective/non_score_reward", penalty)
        metrics.mean("objective/rlhf_reward", scores + penalty)
        metrics.mean("policy/entropy_avg", out.entropy, mask)
        metrics.mean("val/values", out.values, mask)
        for i, row in enumerate(batch.rows):
            sampled = answers.completions[row].logprobs
            if sampled is not None:
                gap = torch.tensor(sampled, device=mask.device) - out.logprobs[i, : len(sampled)]
                metrics.mean("rollout/logprob_gap", gap.abs())

    def note_policy(self, new_logprobs: Tensor, old: Experience, metrics: Metrics, *, is_first: bool) -> None:
        """How far the policy moved from the one that sampled; exactly nowhere at an update's first mini-batch."""
        mask = old.batch.response_mask
        ratio = algo.ratio(new_logprobs, old.logprobs)
        clipped = algo.clipped(new_logprobs, old.logprobs, old.advantages, cliprange=self.config.ppo.cliprange)
        metrics.mean("policy/approxkl_avg", algo.approx_kl(new_logprobs, old.logprobs), mask)
        metrics.mean("policy/clipfrac_avg", clipped, mask)
        metrics.mean("val/ratio", ratio, mask)
        metrics.var("val/ratio_var", ratio, mask)
        metrics.max("val/ratio_max", ratio, mask)
        if is_first:
            metrics.max("val/first_ratio_error", (ratio - 1).abs(), mask)

    def summary(self, metrics: Metrics) -> dict[str, float]:
        """The update's metrics as numbers, with what follows from them."""
        batch_size = self.config.train.rollout_batch_size
        values = metrics.compute()
        values["episode"] = float((self.state.step + 1) * batch_size)
        values["eps"] = batch_size / values["time/step_s"]
        values["objective/kl_coef"] = self.state.kl_coef
        values["objective/scores_std"] = values.pop("objective/scores_var") ** 0.5
        returns_var, residual_var = values.pop("val/returns_var"), values.pop("val/residual_var")
        values["val/explained_variance"] = 1 - residual_var / returns_var if returns_var > 0 else 0.0
        return values

    def steer_kl(self, metrics: dict[str, float]) -> None:
        """Moves the KL coefficient towards ``kl_target``, if there is one."""
        ppo = self.config.ppo
        if ppo.kl_target is not None and "objective/kl" in metrics:
            self.state.kl_coef = algo.adaptive_kl_coef(
                self.state.kl_coef,
                metrics["objective/kl"],
                target=ppo.kl_target,
                horizon=ppo.kl_horizon,
                num_episodes=self.config.train.rollout_batch_size,
            )


def whiten_together(parts: list[Tensor], masks: list[Tensor], *, keep_mean: bool) -> list[Tensor]:
    """Whitens [M, R] tensors of different shapes by the moments of all their response tokens."""
    flat = torch.cat([x.reshape(1, -1) for x in parts], dim=1)
    mask = torch.cat([m.reshape(1, -1) for m in masks], dim=1)
    white = algo.whiten(flat, mask, keep_mean=keep_mean).split([x.numel() for x in parts], dim=1)
    return [w.reshape(x.shape) for w, x in zip(white, parts, strict=True)]


@contextmanager
def timed(metrics: Metrics, phase: str) -> Iterator[None]:
    """Adds the seconds spent inside to ``time/PHASE_s``."""
    start = time.perf_counter()
    yield
    metrics.sum(f"time/{phase}_s", time.perf_counter() - start)
