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
from tether.data.collate import collate
from tether.data.demonstrations import demonstration_batches
from tether.data.stream import PromptStream
from tether.errors import TrainingError
from tether.metrics.reduce import Metrics
from tether.models.forward import LogprobOutput
from tether.models.roles import POLICY, VALUE, Pass
from tether.train.callbacks import Callbacks
from tether.train.checkpoint import Checkpoints, RunState
from tether.train.distributed import Dist
from tether.train.ema import PolicyAverage
from tether.train.evaluate import evaluate
from tether.train.experience import Outputs, experience, joined, targets
from tether.train.guard import check_finite, check_gradients, suspicions
from tether.train.interrupt import Stopped, StopRequest
from tether.train.log import RunLog
from tether.train.measure import derived, measure_answers, measure_critic, measure_objective, measure_policy
from tether.train.optim import PassOptimizer, build_optimizers
from tether.train.parts import Parts
from tether.train.rollout import Answers, Judged, answer, micro_batch_plan, raw_scores, shaped_scores
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
        self.stream = PromptStream(len(parts.prompts), config.prompts_per_update, config.train.seed)
        self.optimizers = build_optimizers(config, parts.roles, self.num_updates)
        trained = parts.roles.role(POLICY).trained
        self.average = PolicyAverage(trained, config.train.ema_decay) if config.train.ema_decay else None
        self.checkpoints = Checkpoints(config, parts.roles, parts.tokenizer, self.optimizers, self.average)
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
                if self.config.ppo.score_norm == "frozen" and self.state.score_moments.count == 0:
                    self.freeze_score_moments()
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
            self.checkpoints.restore_weights(self.state.best_step)
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
        with self.policy_to_keep():
            metrics, samples = evaluate(
                self.parts, self.config, self.state.score_moments, phase=self.log.phase, check=self.stop.check
            )
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

    @contextmanager
    def policy_to_keep(self) -> Iterator[None]:
        """Inside, the policy has the weights that are evaluated and saved: their moving average, if one is kept."""
        if self.average is None:
            yield
            return
        try:
            with self.average.applied():
                self.parts.generator.sync_weights(self.roles.policy)
                yield
        finally:
            self.parts.generator.sync_weights(self.roles.policy)

    def freeze_score_moments(self) -> None:
        """Measures mean and spread of the start policy's scores, by which all later scores are normalised."""
        seed, count = self.config.train.seed, self.config.ppo.score_norm_samples
        draws = PromptStream(len(self.parts.prompts), count, seed).batch(0)
        prompts = [self.parts.prompts[i] for i, _ in draws]
        requests = [
            Request(prompt.token_ids, noise_key(seed, "score_norm", prompt.row, sample))
            for prompt, (_, sample) in zip(prompts, draws, strict=True)
        ]
        answers = answer(
            self.parts, prompts, requests, phase=self.log.phase, check=self.stop.check, name="score statistics"
        )
        moments = algo.merged_moments(algo.ScoreMoments(), raw_scores(self.parts, answers)[0])
        if moments.var == 0:
            raise TrainingError(
                f"ppo.score_norm frozen: all {count} answers of the start policy have the score {moments.mean:g}, so "
                "there is no spread to measure scores by. Leave score_norm out, or give rewards that tell answers apart"
            )
        self.log.message(
            f"scores are normalised by those of {count} answers of the start policy: mean {moments.mean:.3g}, "
            f"standard deviation {moments.var**0.5:.3g}"
        )
        self.state.score_moments = moments

    # One update

    def step(self) -> dict[str, float]:
        """Runs one update; returns its metrics."""
        metrics = Metrics()
        with timed(metrics, "step"):
            answers = self.rollout(metrics)
            scores, moments = self.score(answers, metrics)
            experience = self.experience(answers, scores, metrics)
            self.update(experience, answers, metrics)
            self.parts.generator.sync_weights(self.roles.policy)
        values = self.summary(metrics)
        self.state.score_moments = moments
        self.steer_kl(values)
        if self.average is not None and not self.is_warming_up:
            self.average.update()
        for optimizer in self.optimizers:
            optimizer.note(values["objective/scores"])
        return values

    def rollout(self, metrics: Metrics) -> Answers:
        """The policy's answers to this update's prompts, those to one prompt in neighbouring rows."""
        draws, each = self.stream.batch(self.state.step), self.config.sampling.num_generations
        asked = [(self.parts.prompts[i], draw * each + sample) for i, draw in draws for sample in range(each)]
        requests = [
            Request(prompt.token_ids, noise_key(self.config.train.seed, "train", prompt.row, sample))
            for prompt, sample in asked
        ]
        prompts = [prompt for prompt, _ in asked]
        with timed(metrics, "rollout"):
            answers = answer(self.parts, prompts, requests, phase=self.log.phase, check=self.stop.check)
        measure_answers(metrics, answers)
        return answers

    def score(self, answers: Answers, metrics: Metrics) -> tuple[Tensor, algo.ScoreMoments]:
        """What is trained on, [B] float32, and the moments that it was normalised by."""
        with timed(metrics, "reward"):
            raw, components = raw_scores(self.parts, answers)
        moments = self.state.score_moments
        if self.config.ppo.score_norm == "running":
            moments = algo.merged_moments(moments, raw)
        scores = shaped_scores(raw, answers, self.config, moments)
        metrics.mean("objective/scores", scores)
        metrics.var("objective/scores_var", scores)
        for name, values in components.items():
            metrics.mean(f"rewards/{name}", torch.tensor(values))
        judged = Judged(scores, components)
        self.log.samples(self.state.step + 1, "train", answers, judged, limit=self.config.train.log_samples)
        self.stop.check()
        return scores, moments

    @torch.no_grad()
    def experience(self, answers: Answers, scores: Tensor, metrics: Metrics) -> list[Experience]:
        """Everything the update needs, a record for each micro-batch."""
        ppo, kl_coef = self.config.ppo, self.state.kl_coef
        batches = self.micro_batches(answers)
        with timed(metrics, "logprobs"):
            outputs = self.outputs(batches, answers)
        scores = scores.to(outputs.logprobs)
        kept = outputs.mask & answers.ended.to(outputs.mask.device).unsqueeze(1) if ppo.mask_truncated else outputs.mask
        learned = targets(
            outputs, scores, kept, ppo, kl_coef=kl_coef, num_generations=self.config.sampling.num_generations
        )
        measure_objective(metrics, outputs, scores, answers, ppo, kl_coef=kl_coef)
        measure_critic(metrics, outputs, learned)
        return experience(batches, outputs, learned, kept, kl_loss_coef=kl_coef if ppo.kl_in == "loss" else 0.0)

    def outputs(self, batches: list[MicroBatch], answers: Answers) -> Outputs:
        """What policy, critic and reference say of the rollout batch."""
        temperature, seen, refs = self.config.sampling.temperature, [], []
        for done, batch in enumerate(batches):
            self.log.phase("log-probabilities", done, len(batches))
            self.stop.check()
            out = self.roles.score_pass(batch, temperature)
            ref = self.roles.ref_logprobs(batch, temperature) if self.roles.has_reference else None
            check_finite(
                self.config.output_dir, answers, batch, logprobs=out.logprobs, values=out.values, ref_logprobs=ref
            )
            seen.append(out)
            refs.append(ref)
        return Outputs(
            mask=joined([batch.response_mask for batch in batches], batches),
            logprobs=joined([out.logprobs for out in seen], batches),
            entropy=joined([out.entropy for out in seen], batches),
            values=joined([out.values for out in seen], batches),
            ref_logprobs=joined(refs, batches),
        )

    def update(self, experience: list[Experience], answers: Answers, metrics: Metrics) -> None:
        """Several epochs of mini-batches; each is one optimizer step, until the policy has gone too far."""
        ppo = self.config.ppo
        total, stopped = ppo.num_ppo_epochs * ppo.num_mini_batches, False
        with timed(metrics, "update"):
            for done, mini_batch in enumerate(self.mini_batches(experience)):
                if not stopped:
                    self.log.phase("update", done, total)
                    stopped = self.add_gradients(mini_batch, done, answers, metrics)
                for optimizer in self.training_optimizers():
                    if stopped:
                        optimizer.skip()
                    else:
                        self.take_step(optimizer, metrics)
                metrics.sum("update/num_steps", float(not stopped))

    def add_gradients(self, mini_batch: list[Experience], number: int, answers: Answers, metrics: Metrics) -> bool:
        """Adds up the gradient of one optimizer step. Returns whether the policy went too far to take it.

        Args:
            number: of the mini-batch within the update.
        """
        ppo, drift = self.config.ppo, Metrics()
        parts = [
            algo.normaliser(item.loss_mask, how=ppo.loss_reduction, max_length=self.config.sampling.response_length)
            for item in mini_batch
        ]
        normaliser = self.dist.sum(torch.stack(parts).sum()).clamp(min=1.0)
        for item in mini_batch:
            self.accumulate(item, normaliser, answers, metrics, drift, is_first=number == 0)
        if self.parts.demonstrations and not self.is_warming_up:
            self.imitate(number, metrics)
        if self.is_warming_up:
            for parameter in self.roles.role(POLICY).trained.values():
                parameter.grad = None  # of a trunk that the critic shares
        check_gradients(self.config.output_dir, self.optimizers, answers, mini_batch)
        return self.is_too_far(drift)

    def accumulate(
        self,
        item: Experience,
        normaliser: Tensor,
        answers: Answers,
        metrics: Metrics,
        drift: Metrics,
        *,
        is_first: bool,
    ) -> None:
        """Adds the gradient of one micro-batch's share of the mini-batch loss."""
        ppo = self.config.ppo
        for pass_ in self.training_passes():
            with_entropy = ppo.entropy_coef > 0 and POLICY in pass_.trains
            with pass_(item.batch, temperature=self.config.sampling.temperature, with_entropy=with_entropy) as new:
                losses = self.losses(new, item, metrics, drift, is_first=is_first)
                check_finite(self.config.output_dir, answers, item.batch, **losses)
                weights = {
                    "policy_loss": 1.0,
                    "kl_loss": item.kl_loss_coef,
                    "entropy": -ppo.entropy_coef,
                    "value_loss": ppo.vf_coef if len(pass_.trains) > 1 else 1.0,
                }
                total = sum(
                    weights[name] * algo.reduced(x, item.loss_mask, how=ppo.loss_reduction)
                    for name, x in losses.items()
                )
                self.dist.backward(total / normaliser.to(total))

    def imitate(self, number: int, metrics: Metrics) -> None:
        """Adds the gradient of the SFT loss on as many demonstrations as the mini-batch has answers.

            ptx_coef · mean over their response tokens of −log π

        Args:
            number: of the mini-batch within the update.
        """
        config, ppo = self.config, self.config.ppo
        step = self.state.step * ppo.num_ppo_epochs * ppo.num_mini_batches + number
        batches = demonstration_batches(
            self.parts.demonstrations,
            step,
            batch_size=config.mini_batch_size,
            seed=config.train.seed,
            max_rows=config.train.max_rows_per_micro_batch or config.mini_batch_size,
            max_tokens=config.train.max_tokens_per_micro_batch,
        )
        num_tokens = self.dist.sum(torch.tensor(float(sum(batch.num_response_tokens for batch in batches))))
        (policy_pass,) = (pass_ for pass_ in self.roles.passes if POLICY in pass_.trains)
        for batch in batches:
            batch = batch.to(self.dist.device)
            with policy_pass(batch, temperature=1.0) as out:
                metrics.mean("loss/ptx_avg", -out.logprobs.detach(), batch.response_mask)
                loss = -algo.masked_sum(out.logprobs, batch.response_mask) / num_tokens.to(out.logprobs)
                self.dist.backward(ppo.ptx_coef * loss)

    def losses(
        self, new: LogprobOutput, old: Experience, metrics: Metrics, drift: Metrics, *, is_first: bool
    ) -> dict[str, Tensor]:
        """Per-token losses, [M, R], of what this pass computed."""
        ppo, mask, losses = self.config.ppo, old.loss_mask, {}
        if new.logprobs is not None and not self.is_warming_up:
            losses["policy_loss"] = algo.policy_loss(
                new.logprobs,
                old.logprobs,
                old.advantages,
                cliprange=ppo.cliprange,
                cliprange_high=ppo.cliprange_high,
                dual_clip=ppo.dual_clip,
            )
            if old.ref_logprobs is not None:
                losses["kl_loss"] = algo.kl_loss(new.logprobs, old.logprobs, old.ref_logprobs, ppo.kl_estimator)
                metrics.mean("loss/kl_avg", losses["kl_loss"].detach(), mask)
            if new.entropy is not None:
                losses["entropy"] = new.entropy
            metrics.mean("loss/policy_avg", losses["policy_loss"].detach(), mask)
            measure_policy(metrics, new.logprobs.detach(), old, ppo, is_first=is_first)
            drift.mean("approx_kl", algo.approx_kl(new.logprobs.detach(), old.logprobs), mask)
            drift.mean("ratio", algo.ratio(new.logprobs.detach(), old.logprobs), mask)
        if new.values is not None:
            clip = {"cliprange_value": ppo.cliprange_value}
            losses["value_loss"] = algo.value_loss(new.values, old.values, old.returns, **clip)
            clipped = algo.value_clipped(new.values.detach(), old.values, old.returns, **clip)
            metrics.mean("loss/value_avg", losses["value_loss"].detach(), mask)
            metrics.mean("val/clipfrac_avg", clipped, mask)
        return losses

    def is_too_far(self, drift: Metrics) -> bool:
        """Whether the policy left the one that sampled by more than ``max_approx_kl`` or ``max_ratio`` allow."""
        ppo = self.config.ppo
        limits = {"approx_kl": ppo.max_approx_kl, "ratio": ppo.max_ratio}
        if self.is_warming_up or all(limit is None for limit in limits.values()):
            return False
        moved = drift.compute()
        return any(limit is not None and moved[name] > limit for name, limit in limits.items())

    def take_step(self, optimizer: PassOptimizer, metrics: Metrics) -> None:
        """One optimizer step with its gradient's norm clipped."""
        metrics.value("lr" if optimizer.name == POLICY else f"{optimizer.name}/lr", optimizer.learning_rate)
        metrics.mean(f"{optimizer.name}/grad_norm", optimizer.clip())
        optimizer.step()

    # Parts of an update

    @property
    def is_warming_up(self) -> bool:
        """Whether this update trains the critic alone."""
        return self.state.step < self.config.value.warmup_steps

    def training_passes(self) -> list[Pass]:
        """The passes of this update: not the policy's own while the critic warms up."""
        return [p for p in self.roles.passes if VALUE in p.trains or not self.is_warming_up]

    def training_optimizers(self) -> list[PassOptimizer]:
        """The optimizers of this update's passes."""
        names = {pass_.name for pass_ in self.training_passes()}
        return [optimizer for optimizer in self.optimizers if optimizer.name in names]

    def micro_batches(self, answers: Answers) -> list[MicroBatch]:
        """The rollout batch in padded micro-batches, formed once: every pass of this update uses the same ones."""
        queries = [prompt.token_ids for prompt in answers.prompts]
        responses = [completion.token_ids for completion in answers.completions]
        return [
            collate([queries[i] for i in rows], [responses[i] for i in rows], rows).to(self.dist.device)
            for rows in micro_batch_plan(self.config, queries, responses)
        ]

    def mini_batches(self, experience: list[Experience]) -> Iterator[list[Experience]]:
        """The micro-batches of every epoch, freshly shuffled, in groups; one group is one optimizer step.

        Groups hold equally many answers, or with a token budget as nearly so as whole micro-batches allow.
        """
        for epoch in range(self.config.ppo.num_ppo_epochs):
            seed = noise_key(self.config.train.seed, "shuffle", self.state.step, epoch)
            order = torch.randperm(len(experience), generator=torch.Generator().manual_seed(seed)).tolist()
            group, answers, number = [], 0, 1
            for i in order:
                group.append(experience[i])
                answers += len(experience[i].batch.rows)
                if answers >= number * self.config.mini_batch_size:
                    yield group
                    group, number = [], number + 1

    def summary(self, metrics: Metrics) -> dict[str, float]:
        """The update's metrics as numbers, with what follows from them."""
        batch_size = self.config.train.rollout_batch_size
        values = derived(metrics.compute())
        values["episode"] = float((self.state.step + 1) * batch_size)
        values["eps"] = batch_size / values["time/step_s"]
        values["objective/kl_coef"] = self.state.kl_coef
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


@contextmanager
def timed(metrics: Metrics, phase: str) -> Iterator[None]:
    """Adds the seconds spent inside to ``time/PHASE_s``."""
    start = time.perf_counter()
    yield
    metrics.sum(f"time/{phase}_s", time.perf_counter() - start)
