"""Proximal policy optimization of a language model. ``PPOTrainer.step`` shows one update from start to end.

    rollout      the policy answers a batch of prompts
    score        reward sources score the answers                                   ``rollout.shaped_scores``
    experience   log-probabilities, values and the KL to the reference become
                 advantages and returns                                             ``experience.targets``
    update       clipped policy and value losses over several epochs of
                 mini-batches                                                       ``update.Update.losses``

The functions on the right say what is computed; its formulas are in ``tether.algo``. docs/algorithm.md lists them all.
Only ``tether.models.roles`` knows which model plays which role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

from tether import algo
from tether.config.keys import counted
from tether.config.schema import PPOConfig, RunConfig
from tether.data.stream import PromptStream
from tether.errors import (
    CheckpointError,
    ConfigError,
    GenerationError,
    LostProcess,
    OutOfStep,
    RewardError,
    RewardResponseError,
    TrainingError,
)
from tether.machine.distributed import met_by_all
from tether.metrics.reduce import Metrics
from tether.metrics.writers import read_jsonl
from tether.models.checkpoints import METRICS
from tether.models.fit import steady_positions
from tether.models.forward import LogprobOutput
from tether.models.roles import POLICY, REFERENCE
from tether.rewards.norms import measured, normalised, unmeasured
from tether.train.batches import micro_batches
from tether.train.callbacks import Callbacks
from tether.train.checkpoint import Checkpoints, RunState, last_complete
from tether.train.costs import PassCosts, num_read, phase, product_rate, timed, with_rates
from tether.train.critic_scale import scale_copy
from tether.train.ema import PolicyAverage
from tether.train.engines.base import out_of_step
from tether.train.evaluate import evaluate
from tether.train.experience import Outputs, experience, importance, joined, targets
from tether.train.guard import Guard, NotFinite
from tether.train.interrupt import Stopped, StopRequest
from tether.train.log import RunLog
from tether.train.measure import derived, measure_answers, measure_critic, measure_objective
from tether.train.memory import dry_step, next_halving
from tether.train.norms import spread, start_answers
from tether.train.optim import PassOptimizer, build_optimizers
from tether.train.parts import Parts
from tether.train.random_state import random_states, set_random_states
from tether.train.rollout import (
    Answers,
    Judged,
    answer,
    check_answers,
    early_scores,
    raw_scores,
    shaped_scores,
)
from tether.train.suspicions import Watch
from tether.train.update import Update
from tether.types import Experience, MicroBatch, Request, RewardOutput, noise_key

T = TypeVar("T")
MEASURED = {"score": "objective/scores", "update": "update/num_steps"}
"""A metric of each phase without which an update cannot be finished."""


class PPOTrainer:
    """Trains ``parts.roles.policy`` to maximize ``parts.rewards``.

    Args:
        config: the run's configuration.
        parts: models, reward sources and prompts.
        read: ``fingerprints`` of what the run reads, by which its checkpoints are recognized.
        log: receives metrics, samples and progress.
        callbacks: called at every event; one step is one update.
        optimizers: used instead of those that the configuration specifies.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        *,
        read: Mapping[str, str],
        log: RunLog,
        callbacks: Callbacks,
        optimizers: list[PassOptimizer] | None = None,
    ) -> None:
        self.config, self.parts, self.roles, self.log = config, parts, parts.roles, log
        self.dist, self.engine = parts.dist, parts.engine
        self.num_updates = config.num_updates(len(parts.prompts))
        self.stream = PromptStream(len(parts.prompts), config.prompts_per_update, config.train.seed)
        self.optimizers = optimizers or build_optimizers(config, parts.roles, self.num_updates)
        self.engine.prepare(self.optimizers)
        trained, decay = parts.roles.role(POLICY).trained, config.train.ema_decay
        self.average = PolicyAverage(trained, decay, self.engine.part) if decay else None
        self.checkpoints = Checkpoints(config, parts, self.optimizers, self.average, read)
        self.callbacks = callbacks
        self.callbacks.attach(parts.roles.policy, parts.tokenizer)
        self.state = RunState(kl_coef=config.ppo.kl_coef)
        self.stop = StopRequest(config.train.max_runtime, self.dist)
        self.guard = Guard(config.output_dir, config.train.max_bad_batches, log.message, self.dist)
        self.costs = PassCosts(parts.roles)
        self.watch = Watch(config)
        self.before = random_states()
        """States of the global random generators when the weights were last those of a finished update."""

    # The run

    def fit(self) -> str | None:
        """Trains until the last update. Returns None, or why the run stopped early with its state saved.

        Raises:
            RewardError: answers could not be scored; the state after the last finished update is saved.
            ConfigError: a checkpoint cannot be written, or there will not be enough room for checkpoints.
            CheckpointError: the disk cannot be written to any more; finished checkpoints are complete.
            GenerationError, TrainingError: too many non-finite values, not even one answer fits into memory, or no
                token took part in a loss.
            LostProcess, OutOfStep: one of several processes could not continue, so none can.
        """
        try:
            with self.stop, self.checkpoints.may_run_out():  # a signal must not interrupt saving either
                return self._fit()
        except (GenerationError, TrainingError) as error:
            if self.state.had_tokens:
                error.add_note(self.guard.marked(last_complete(self.config.output_dir)))
            raise
        except (LostProcess, OutOfStep) as error:
            if self.dist.is_main:
                error.add_note(f"{self.checkpoints.way_on()}.")
            raise

    def _fit(self) -> str | None:
        if self.state.saved_step is None:
            self.log.phase("trying to save", 0, 1)
            self.checkpoints.try_saving(self.state, self.num_updates)
        if self.wants_dry_step():
            self.dry_step()
        self.callbacks.train_begin()
        self.log.display.update(self.state.step, self.num_updates, {})
        self.before = random_states()
        try:
            with self.stop:
                self.freeze_norms()
                if self.state.evaluated_step != self.state.step and self.evaluation_due():
                    self.evaluate()  # before the first update, or where the resumed run was stopped
                while self.state.step < self.num_updates and not self.dist.any(self.callbacks.stop_requested):
                    self.before = random_states()
                    self.stop.agree()
                    self.train_one_update()
                if self.state.evaluated_step != self.state.step:
                    self.evaluate()
        except Stopped as stopped:
            set_random_states(self.before)
            self.save()
            return str(stopped)
        except RewardError as error:
            if self.state.step > 0 or self.state.evaluated_step is not None:
                set_random_states(self.before)
                self.save()  # scoring happens before an update changes anything
                done = counted(self.state.step, "update")
                error.add_note(f"the state after {done} is saved; --resume continues from there")
            raise
        self.check_trained()
        self.log.finished(self.state.step, self.restore_best(), self.checkpoints.read)
        self.callbacks.train_end()
        return None

    def train_one_update(self) -> None:
        """Runs one update and what may follow it: logging, evaluation, a checkpoint."""
        self.callbacks.step_begin()
        self.record(self.step())
        if self.evaluation_due():
            self.evaluate()
        if self.is_due("save", self.config.train.save_steps) and self.state.saved_step != self.state.step:
            self.save()

    def check_trained(self) -> None:
        """Raises ``TrainingError`` if no token took part in a loss of any update."""
        if self.state.step > 0 and not self.state.had_tokens:
            raise met_by_all(
                TrainingError(
                    f"nothing was trained: none of the answers of {counted(self.state.step, 'update')} ended within "
                    f"sampling.response_length {self.config.sampling.response_length}, and ppo.mask_truncated leaves "
                    "such answers out of all losses. Set a larger sampling.response_length, or ppo.mask_truncated: "
                    "false. No policy is written"
                )
            )

    def restore_best(self) -> int:
        """Replaces the last policy by the best one, if requested; returns the number of updates that the kept policy
        was trained for."""
        last, best, name = self.state.step, self.state.best_step, self.config.train.metric_for_best_model
        if not self.config.train.load_best_model_at_end or best is None:
            return last
        try:
            self.checkpoints.restore_weights(best)
        except CheckpointError as error:
            self.log.message(f"warning: {error}; the policy of the last update is kept instead of the best one")
            return last
        value = self.state.best_metric
        self.log.message(f"kept: the policy after update {best} of {last}, with the best {name}, {value:.3g}")
        return best

    # One update

    def step(self) -> dict[str, float]:
        """Runs one update; returns its metrics."""
        metrics = Metrics()
        with timed(metrics, "step", self.dist.device):
            answers = self.rollout(metrics, ask=True)
            judged, moments = self.score(answers, metrics)
            self.release_memory()
            optimizers = self.learn(answers, judged, metrics)
            self.release_memory()
            self.parts.generator.sync_weights(self.roles.policy)
        return self.finish(metrics, moments, optimizers)

    def rollout(self, metrics: Metrics, *, ask: bool = False) -> Answers:
        """Generates the policy's answers to this update's prompts, those to one prompt in neighboring rows.

        Args:
            ask: whether reward sources that wait for something external are asked about answers as they finish.
        """
        draws, each = self.stream.batch(self.state.step), self.config.sampling.num_generations
        asked = [(self.parts.prompts[i], draw * each + sample) for i, draw in draws for sample in range(each)]
        requests = [
            Request(prompt.token_ids, noise_key(self.config.train.seed, "train", prompt.row, sample), prompt.before)
            for prompt, sample in asked
        ]
        prompts = [prompt for prompt, _ in asked]
        with phase(metrics, "rollout", self.dist.device):
            answers = answer(self.parts, prompts, requests, phase=self.log.phase, check=self.stop.check, ask=ask)
        with metrics.known():
            measure_answers(metrics, answers)
        return answers

    def score(
        self, answers: Answers, metrics: Metrics, output: RewardOutput | None = None
    ) -> tuple[Judged, algo.ScoreMoments]:
        """Returns the scores to train on and the moments used to normalize them. At the first call, a critic that is a
        copy of the first reward source is put on the scale of these scores.

        Args:
            output: scores of the answers, if the caller already has them; otherwise the reward sources are called.

        Raises:
            DataError: the answers, if the caller made them, are no rollout batch of this run.
            RewardError: an answer could not be scored.
        """
        shape = self.roles.role(POLICY).model.config
        check_answers(answers, self.config, num_rows=self.roles.policy_rows, positions=steady_positions(shape))
        with phase(metrics, "reward", self.dist.device):
            try:
                with self.stop.at_once():
                    raw, output = raw_scores(self.parts, answers, output)
            except RewardResponseError as error:
                path = self.guard.write_down(str(error), answers, range(len(answers.texts)))
                self.log.message(f"the answers that have no score are in {path}")
                raise
        moments = self.state.score_moments
        if self.config.ppo.score_norm == "running":
            moments = algo.merged_moments(moments, raw)
        scores = shaped_scores(raw, answers, self.config, moments)
        with metrics.known():
            metrics.mean("objective/scores", scores)
            metrics.var("objective/scores_var", scores)
            for name, values in output.components.items():
                metrics.mean(f"rewards/{name}", values)
        judged = Judged(scores, output.components, early_scores(output, answers, self.config, moments))
        self.log.samples(self.state.step + 1, answers, judged, limit=self.config.train.log_samples)
        self.scale_critic(judged, moments)
        self.stop.agree()
        return judged, moments

    def scale_critic(self, judged: Judged, moments: algo.ScoreMoments) -> None:
        """Puts a critic that is a copy of the first reward source on the scale of the scores to train on: once, before
        its values are first computed."""
        if self.state.is_critic_scaled:
            return
        self.state.is_critic_scaled = True
        told = scale_copy(self.parts, judged.components, None if self.config.ppo.score_norm is None else moments)
        if told is not None:
            self.log.message(told)

    def learn(self, answers: Answers, judged: Judged, metrics: Metrics) -> list[PassOptimizer]:
        """Runs ``experience`` and ``update``. Restarts them with smaller micro-batches if those do not fit into memory,
        and skips them if an output of the policy, the reference or the critic is not finite."""
        while True:
            try:
                with metrics.attempt():
                    experience = self.experience(answers, judged, metrics)
                    self.release_memory()
                    return self.update(experience, answers, metrics)
            except NotFinite as error:
                self.guard.leave_out(error)
                return self.left_out(answers, metrics)
            except torch.OutOfMemoryError as error:
                self.halve(error)
            self.release_memory()

    @torch.no_grad()
    def experience(self, answers: Answers, judged: Judged, metrics: Metrics) -> list[Experience]:
        """Everything the update needs, one record for each of this process's micro-batches."""
        config, ppo, kl_coef = self.config, self.config.ppo, self.state.kl_coef
        batches = self.micro_batches(answers)
        with self.roles.fetched():
            outputs = self.outputs(batches, answers, metrics)
        scores = judged.scores.to(outputs.logprobs)
        kept = outputs.mask & answers.ended.to(outputs.mask.device).unsqueeze(1) if ppo.mask_truncated else outputs.mask
        learned = targets(outputs, scores, kept, config, kl_coef=kl_coef, early_scores=judged.early_scores)
        with metrics.known():
            measure_objective(metrics, outputs, scores, answers, config, kl_coef=kl_coef)
            measure_critic(metrics, outputs, learned)
        in_loss = kl_coef if ppo.kl_in == "loss" else 0.0
        weights = importance(outputs, answers.completions, config.importance_cap)
        return experience(batches, outputs, learned, kept, kl_loss_coef=in_loss, weights=weights, dist=self.dist)

    def outputs(self, batches: list[MicroBatch], answers: Answers, metrics: Metrics) -> Outputs:
        """Outputs of policy, critic and reference for the rollout batch, one role after the other: switching roles and
        waiting for the device, as measuring a phase does, may take as long as a micro-batch."""
        temperature, passes = self.config.sampling.temperature, self.roles.passes
        total, done = (len(passes) + self.roles.has_reference) * len(batches), count()

        def of_all(role: str, name: str, compute: Callable[[MicroBatch], T]) -> list[T]:
            self.stop.agree()
            found = []
            with phase(metrics, name, self.dist.device), self.roles.switched_to(role):
                for batch in batches:
                    self.log.phase("log-probabilities", next(done), total)
                    self.stop.check()
                    found.append(compute(batch))
            return found

        seen, refs = [LogprobOutput(None, None, None)] * len(batches), [None] * len(batches)
        for pass_ in passes:
            name, score = "logprobs" if POLICY in pass_.trains else "values", self.roles.score_pass
            found = of_all(pass_.name, name, partial(score, temperature=temperature, passes=[pass_]))
            seen = [new.or_else(old) for new, old in zip(found, seen, strict=True)]
        if self.roles.has_reference:
            refs = of_all(REFERENCE, "reference", partial(self.roles.ref_logprobs, temperature=temperature))
        for batch, out, ref in zip(batches, seen, refs, strict=True):
            metrics.sum("tokens/read", num_read(batch))
            self.guard.check(answers, batch, logprobs=out.logprobs, values=out.values, ref_logprobs=ref)
        width = self.dist.max(torch.tensor(max(batch.response_mask.shape[1] for batch in batches)))
        mask = algo.length_mask(answers.lengths.to(self.dist.device), int(width))
        whole = partial(joined, batches=batches, shape=tuple(mask.shape), dist=self.dist)
        return Outputs(
            mask=mask,
            logprobs=whole([out.logprobs for out in seen]),
            entropy=whole([out.entropy for out in seen]),
            values=whole([out.values for out in seen]),
            ref_logprobs=whole(refs),
        )

    def micro_batches(self, answers: Answers) -> list[MicroBatch]:
        """This process's part of the rollout batch in padded micro-batches, formed once and used by every pass of this
        update."""
        return micro_batches(answers, self.config, self.dist, halvings=self.state.halvings)

    def update(self, experience: list[Experience], answers: Answers, metrics: Metrics) -> list[PassOptimizer]:
        """Runs several epochs of mini-batches, one optimizer step each; see ``tether.train.update``.

        Returns the optimizers that took part: not the policy's during critic warm-up.
        """
        update = self.one_update(answers, metrics)
        with phase(metrics, "update", self.dist.device):
            update.run(experience)
        while self.state.halvings < update.halvings:
            self.halve(torch.OutOfMemoryError("in the middle of an update"))
        if self.average is not None and not update.is_warming_up:
            self.average.update()
        return update.optimizers_in_use()

    def one_update(self, answers: Answers, metrics: Metrics, *, step: int | None = None) -> Update:
        """An update that has not run yet: the current one, or the one after ``step`` finished updates."""
        return Update(
            self.config,
            self.parts,
            self.optimizers,
            step=self.state.step if step is None else step,
            answers=answers,
            metrics=metrics,
            phase=self.log.phase,
            guard=self.guard,
            halvings=self.state.halvings,
            costs=self.costs,
        )

    def left_out(self, answers: Answers, metrics: Metrics) -> list[PassOptimizer]:
        """Records an update without a step; advances the schedules of the optimizers that would have stepped, and
        returns these optimizers."""
        update, ppo = self.one_update(answers, metrics), self.config.ppo
        count = ppo.num_ppo_epochs * ppo.num_mini_batches
        for optimizer in update.optimizers_in_use():
            for _ in range(count):
                self.engine.skip(optimizer)
        with metrics.known():
            metrics.sum("update/num_steps", 0.0)
            metrics.sum("update/num_bad", float(count))
        return update.optimizers_in_use()

    def finish(
        self, metrics: Metrics, moments: algo.ScoreMoments, optimizers: list[PassOptimizer]
    ) -> dict[str, float]:
        """Finishes an update whose phases have run; returns its metrics.

        Args:
            metrics: those that the phases were given. Times of the whole update are derived from them if the phases ran
                inside of ``timed(metrics, "step", device)``.
            moments: from ``score``.
            optimizers: from ``update``.

        Raises:
            ConfigError: phases of the update did not add to the metrics.
        """
        values = self.summary(metrics)
        self.state.score_moments = moments
        self.steer_kl(values)
        for optimizer in optimizers:
            optimizer.note(values["objective/scores"])
        return values

    def summary(self, metrics: Metrics) -> dict[str, float]:
        """The update's metrics as numbers, including derived ones.

        Raises:
            ConfigError: phases of the update did not add to them.
        """
        batch_size, measured = self.config.train.rollout_batch_size, self.dist.computed(metrics)
        if missing := [phase for phase, name in MEASURED.items() if name not in measured]:
            raise ConfigError(
                f"finish: got metrics without those of {' and '.join(missing)}; wanted the same tether.metrics.reduce."
                "Metrics that all phases of the update were given"
            )
        values = derived(measured)
        values["episode"] = float((self.state.step + 1) * batch_size)
        if "time/step_s" in values:
            values["eps"] = batch_size / values["time/step_s"]
        values = with_rates(values, self.dist.num_processes * product_rate(self.roles))
        values["objective/kl_coef"] = self.state.kl_coef
        return values

    def steer_kl(self, metrics: dict[str, float]) -> None:
        """Adapts the KL coefficient towards ``kl_target``, if it is set and the policy is being trained."""
        ppo, is_warming_up = self.config.ppo, self.state.step < self.config.value.warmup_steps
        if ppo.kl_target is not None and "objective/kl" in metrics and not is_warming_up:
            self.state.kl_coef = algo.adaptive_kl_coef(
                self.state.kl_coef,
                metrics["objective/kl"],
                target=ppo.kl_target,
                horizon=ppo.kl_horizon,
                num_episodes=self.config.train.rollout_batch_size,
            )

    def record(self, metrics: dict[str, float]) -> None:
        """Counts an update and logs its metrics."""
        self.state.step += 1
        self.state.had_tokens |= metrics["update/num_steps"] > 0 or metrics.get("update/num_empty", 0.0) == 0
        self.state.bad_batches, self.guard.step = self.guard.in_a_row, self.state.step + 1
        for text in self.watch.suspicions(metrics):
            self.log.warn_once(text)
        self.log.update(self.state.step, self.num_updates, metrics)
        self.callbacks.step_end(metrics)

    def follow(self, ppo: PPOConfig) -> None:
        """Computes the next updates with these settings; checkpoints keep those that the run began with."""
        self.config = self.config.model_copy(update={"ppo": ppo})
        self.state.kl_coef = ppo.kl_coef

    # Evaluation

    def evaluation_due(self) -> bool:
        """Whether to evaluate now: before the first update, on schedule, or at the request of a callback."""
        return self.state.step == 0 or self.is_due("evaluate", self.config.train.eval_steps)

    def evaluate(self) -> None:
        """Generates and scores answers to the held-out prompts; saves the best result so far if the run keeps it."""
        if not self.parts.eval_prompts:
            return
        self.before = random_states()
        is_moving = self.config.ppo.score_norm == "running"
        with self.policy_to_keep():
            metrics, samples, moments = evaluate(
                self.parts,
                self.config,
                self.state.eval_moments if is_moving else self.state.score_moments,
                phase=self.log.phase,
                check=self.stop.check,
                halvings=self.state.halvings,
                waiting=self.stop.at_once,
            )
        if is_moving:  # one scale for all evaluations
            self.state.eval_moments = moments
        self.state.evaluated_step = self.state.step
        is_best = self.state.note_evaluation(metrics, self.config.train)
        self.log.evaluation(self.state.step, metrics, samples)
        self.callbacks.evaluated(metrics)
        if is_best:
            self.save()

    def is_due(self, what: str, every: int | None) -> bool:
        """Whether an evaluation or a save follows the current update. A callback may request it in a single process,
        for example after checking that process's clock."""
        return self.dist.any(self.callbacks.due(what, every))

    @contextmanager
    def policy_to_keep(self) -> Iterator[None]:
        """Within this context, the policy has the weights to evaluate and save: their moving average, if kept."""
        if self.average is None:
            yield
            return
        try:
            with self.average.applied():
                self.parts.generator.sync_weights(self.roles.policy)
                yield
        finally:
            self.parts.generator.sync_weights(self.roles.policy)

    def freeze_norms(self) -> None:
        """Measures the mean and spread of the start policy's scores if later scores are normalized by them: for each
        source with ``norm: auto``, then for their sum with ``ppo.score_norm: frozen``. A resumed run has them."""
        by_source = bool(unmeasured(self.parts.rewards)) and not self.state.source_moments
        of_sum = self.config.ppo.score_norm == "frozen" and self.state.score_moments.count == 0
        answers = None
        if by_source or of_sum:
            answers = start_answers(self.parts, self.config, phase=self.log.phase, check=self.stop.check)
        if by_source:
            with self.stop.at_once():
                moments = measured(self.parts.rewards, answers.reward_batch(self.parts.tokenizer))
            for name, own in moments.items():
                self.log.message(spread(own, f"norm auto of the reward {name}", "norm"))
            self.state.source_moments = moments
        if self.state.source_moments:
            self.parts = replace(self.parts, rewards=normalised(self.parts.rewards, self.state.source_moments))
        if of_sum:
            with self.stop.at_once():
                moments = algo.merged_moments(algo.ScoreMoments(), raw_scores(self.parts, answers)[0])
            self.log.message(spread(moments, "ppo.score_norm frozen", "score_norm"))
            self.state.score_moments = moments

    # Checkpoints

    def save(self) -> None:
        """Writes checkpoint-N, completely or not at all, and deletes checkpoints beyond the limit."""
        self.state.callbacks = self.callbacks.exported()
        self.state.decode_batch_size = self.parts.generator.batch_size
        path = self.checkpoints.save(self.state)
        self.callbacks.saved(path)

    def resume(self, checkpoint: Path) -> None:
        """Resumes from a checkpoint: weights, optimizers, counters, random states, and the states of callbacks."""
        self.state = self.checkpoints.restore(checkpoint)
        self.guard.step, self.guard.in_a_row = self.state.step + 1, self.state.bad_batches
        self.parts.generator.batch_size = self.state.decode_batch_size
        self.parts.generator.sync_weights(self.roles.policy)
        metrics = self.config.output_dir / METRICS
        self.callbacks.resume(self.state, read_jsonl(metrics) if metrics.exists() else [])

    # Memory

    def wants_dry_step(self) -> bool:
        """Whether to try the longest lengths before training, with the default resolved."""
        wanted = self.config.train.dry_step
        return self.dist.device.type != "cpu" if wanted is None else wanted

    def dry_step(self) -> None:
        """Runs micro-batches of the longest lengths forward and backward, without effect; halves them until they
        fit."""
        self.log.phase("dry step", 0, 1)
        try:
            self.log.message(dry_step(self.config, self.parts, self.micro_batches, self.one_update, self.halve))
        finally:
            self.release_memory()

    def halve(self, error: torch.OutOfMemoryError) -> None:
        """Halves the micro-batches of every later pass. They are planned and shuffled as before and then run in parts,
        so results change only by rounding.

        Raises:
            TrainingError: they already hold only one answer.
            OutOfStep: there are other processes, which are in the middle of the passes that this one cannot run.
        """
        if self.dist.num_processes > 1:
            raise out_of_step("the update's passes", error) from error
        self.state.halvings, told = next_halving(self.config, self.state.halvings, error)
        self.log.message(told)

    def release_memory(self) -> None:
        """Releases unused memory between phases, including heap pages if memory matters more than time."""
        self.dist.release_memory()
        if self.config.train.gradient_checkpointing:
            self.dist.trim_heap()
