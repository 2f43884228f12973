"""The optimizer steps of one update: mini-batch losses, gradients, steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto

import torch
from torch import Tensor

from tether import algo
from tether.config.schema import RunConfig
from tether.data.demonstrations import demonstration_batches
from tether.errors import TrainingError
from tether.metrics.reduce import Metrics
from tether.models.forward import LogprobOutput
from tether.models.roles import POLICY, VALUE, Pass
from tether.train.batches import halved, mini_batches
from tether.train.costs import PassCosts
from tether.train.display import PhaseReport
from tether.train.guard import Guard, NotFinite
from tether.train.measure import measure_policy
from tether.train.optim import PassOptimizer
from tether.train.parts import Parts
from tether.train.rollout import Answers
from tether.types import Experience, MicroBatch


class Gradients(Enum):
    """Outcome of computing the gradients of a mini-batch, which decides whether to step."""

    FIT = auto()
    """Step."""
    OVERFLOWED = auto()
    """No step: they are not finite, possibly because of the loss scale."""
    TOO_FAR = auto()
    """No step now and none later in this update: the policy has moved too far."""
    EMPTY = auto()
    """No step: there are no gradients, because no token takes part."""


class Update:
    """Trains on one rollout batch: several epochs of mini-batches, one optimizer step each.

    Args:
        config: the run's configuration.
        parts: models, processes, and demonstrations if there are any.
        optimizers: one for each pass, or a single one for both, whose loss includes the weighted value loss.
        step: number of finished updates.
        answers: the rollout batch, to write down answers for which something is not finite.
        metrics: receives the measurements.
        phase: called with the progress.
        guard: prevents optimizer steps with values that are not finite.
        halvings: how often micro-batches were halved to fit into memory.
        costs: counts the tokens and computations of the passes.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        optimizers: list[PassOptimizer],
        *,
        step: int,
        answers: Answers,
        metrics: Metrics,
        phase: PhaseReport,
        guard: Guard,
        halvings: int,
        costs: PassCosts,
    ) -> None:
        self.config, self.roles, self.demonstrations = config, parts.roles, parts.demonstrations
        self.dist, self.engine = parts.dist, parts.engine
        self.optimizers, self.step = optimizers, step
        self.answers, self.metrics, self.phase, self.guard, self.costs = answers, metrics, phase, guard, costs
        self.formed_with = halvings
        """How often micro-batches were halved before the update."""
        self.halvings = halvings
        """How often they have been halved so far."""
        self.is_warming_up = step < config.value.warmup_steps
        """Whether this update trains only the critic."""

    def run(self, experience: Sequence[Experience]) -> None:
        """Takes an optimizer step for every finite mini-batch, until the policy has moved too far.

        With separate optimizers, policy and critic alternate: the gradients of one are freed before those of the other
        are computed. A value that is not finite in the policy's pass prevents the steps of both, in the critic's pass
        only that of the critic. Gradients that overflow because of the loss scale prevent only the step of their own
        optimizer. If no token takes part, no optimizer steps and no step is counted. Schedules advance with every
        step, whether it is taken or skipped.

        Raises:
            TrainingError: too many mini-batches in a row are not finite, or one after the first does not fit into
                memory, even one answer at a time, or the optimizer step does not.
            torch.OutOfMemoryError: the first one does not fit; nothing has been changed.
        """
        total, stopped = self.config.ppo.num_ppo_epochs * self.config.ppo.num_mini_batches, False
        for done, mini_batch in enumerate(mini_batches(experience, self.config, self.step)):
            is_bad = overflowed = has_tokens = False
            for optimizer in self.optimizers_in_use():
                gradients = None
                if not (stopped or is_bad):
                    self.phase("optimizer step", done, total)
                    try:
                        gradients = self.fitting_gradients(optimizer, mini_batch, done)
                        stopped = gradients is Gradients.TOO_FAR
                    except NotFinite as error:
                        self.guard.leave_out(error)
                        is_bad = True
                overflowed |= gradients is Gradients.OVERFLOWED
                has_tokens |= gradients not in (None, Gradients.EMPTY)
                if gradients is Gradients.FIT:
                    with self.changing():
                        self.take_step(optimizer)
                else:
                    self.engine.skip(optimizer)
                self.rescale(optimizer, gradients)
            is_whole = has_tokens and not (stopped or is_bad or overflowed)
            if is_whole:
                self.guard.took_step()
            with self.metrics.known():
                self.metrics.sum("update/num_steps", float(is_whole))
                self.metrics.sum("update/num_bad", float(is_bad))
                if self.config.ppo.mask_truncated:
                    self.metrics.sum("update/num_empty", float(not (has_tokens or stopped or is_bad)))

    def fitting_gradients(self, optimizer: PassOptimizer, mini_batch: list[Experience], number: int) -> Gradients:
        """``add_gradients``, with micro-batches halved until they fit into memory.

        Before anything has been changed, the error is left to the trainer, which can halve them for every pass of the
        update. After that the update cannot be restarted.
        """
        is_first = number == 0 and optimizer is self.optimizers_in_use()[0]
        for _ in range(self.halvings - self.formed_with):
            mini_batch = [half for item in mini_batch for half in halved(item)]
        while True:
            try:
                with self.metrics.attempt():
                    return self.add_gradients(optimizer, mini_batch, number)
            except torch.OutOfMemoryError:
                alone = self.dist.num_processes == 1  # other processes would wait forever if this one restarted
                if not alone or is_first:
                    self.drop_gradients()
                    raise
                shows_one = not self.demonstrations or 2**self.halvings >= self.config.mini_batch_size
                if shows_one and all(len(item.batch.rows) == 1 for item in mini_batch):
                    with self.changing():
                        raise
            self.drop_gradients()  # here the error is freed, and with it the tensors that its frames held
            self.dist.release_memory()
            mini_batch = [half for item in mini_batch for half in halved(item)]
            self.halvings += 1

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Within this context, the update has changed something or is about to, so it cannot be restarted.

        Raises:
            TrainingError: out of memory in a single process; with several, the trainer ends them all.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.drop_gradients()
            if self.dist.num_processes > 1:
                raise
            raise TrainingError(
                f"out of memory in the middle of update {self.step + 1}, which has already changed weights and cannot "
                f"be repeated ({error}): keep train.dry_step on, which finds this before training, lower "
                "train.micro_batch_size, set train.gradient_checkpointing, or train with LoRA"
            ) from error

    def drop_gradients(self) -> None:
        """Discards the gradients of an unfinished mini-batch."""
        self.engine.drop_gradients(self.optimizers)

    def add_gradients(self, optimizer: PassOptimizer, mini_batch: list[Experience], number: int) -> Gradients:
        """Accumulates the gradients of one optimizer step. Returns whether to take the step.

        Args:
            number: index of the mini-batch within the update.
        """
        drift, normaliser, passes = Metrics(), self.normaliser(mini_batch), self.passes_of(optimizer)
        trains_policy = not self.is_warming_up and any(POLICY in pass_.trains for pass_ in passes)
        # Largest first: one that does not fit is noticed at once, and later ones fit into the memory that it leaves.
        learned = sorted((item for item in mini_batch if item.takes_part), key=num_places, reverse=True)
        shown, num_tokens = self.own_demonstrations(number) if self.demonstrations and trains_policy else ([], 0.0)
        if not (learned or shown):
            return Gradients.EMPTY
        self.engine.expect({p.name: len(learned) + len(shown) * (POLICY in p.trains) for p in passes})
        for pass_ in passes:
            with self.roles.switched_to(pass_.name):
                for item in learned:
                    self.accumulate(pass_, item, normaliser, drift, optimizer, is_first=number == 0)
        for batch in shown:
            self.imitate(batch, num_tokens, optimizer)
        if self.is_warming_up:
            self.engine.forget(self.roles.role(POLICY).trained.values())  # gradients of a trunk shared with the critic
        are_finite = self.engine.are_finite(optimizer)
        if optimizer.loss_scale is not None and optimizer.loss_scale.may_overflow and self.dist.any(not are_finite):
            return Gradients.OVERFLOWED
        self.guard.check_gradients(are_finite, self.answers, mini_batch)
        optimizer.unscale()
        return Gradients.TOO_FAR if trains_policy and self.is_too_far(drift) else Gradients.FIT

    def normaliser(self, mini_batch: list[Experience]) -> Tensor:
        """The denominator of the mini-batch loss: over all of its micro-batches, in all processes."""
        ppo = self.config.ppo
        parts = [
            algo.normaliser(item.loss_mask, how=ppo.loss_reduction, max_length=self.config.sampling.response_length)
            for item in mini_batch
        ]
        return self.dist.sum(torch.stack(parts).sum()).clamp(min=1.0)

    def accumulate(
        self,
        pass_: Pass,
        item: Experience,
        normaliser: Tensor,
        drift: Metrics,
        optimizer: PassOptimizer,
        *,
        is_first: bool,
    ) -> None:
        """Runs a pass on one micro-batch and adds the gradient of its share of the mini-batch loss.

            loss = Σ (L_policy + β L_KL − c H + v L_value) / N

        over the tokens of all micro-batches, with the parts that the pass computes. N is the ``normaliser``, β the
        coefficient of a KL in the loss, c ``ppo.entropy_coef`` and v the weight of a shared optimizer.
        """
        ppo = self.config.ppo
        with_entropy = ppo.entropy_coef > 0 and POLICY in pass_.trains
        with pass_(item.batch, temperature=self.config.sampling.temperature, with_entropy=with_entropy) as new:
            losses = self.losses(new, item, drift, is_first=is_first)
            self.guard.check(self.answers, item.batch, **losses)
            weights = {
                "policy_loss": 1.0,
                "kl_loss": item.kl_loss_coef,
                "entropy": -ppo.entropy_coef,
                "value_loss": optimizer.value_weight,
            }
            total = sum(
                weights[name] * algo.reduced(x, item.loss_mask, how=ppo.loss_reduction) for name, x in losses.items()
            )
            self.engine.backward(optimizer.scaled(total / normaliser.to(total)), pass_.name)
        self.costs.count(self.metrics, pass_, item.batch)
        if self.config.train.gradient_checkpointing:
            self.dist.trim_heap()  # memory matters more than time

    def own_demonstrations(self, number: int) -> tuple[list[MicroBatch], float]:
        """This process's part of as many demonstrations as a mini-batch has answers, followed by idle micro-batches,
        and the number of response tokens in the parts of all processes.

        Args:
            number: index of the mini-batch within the update.
        """
        config, ppo = self.config, self.config.ppo
        step = self.step * ppo.num_ppo_epochs * ppo.num_mini_batches + number
        batches = demonstration_batches(
            self.demonstrations,
            step,
            batch_size=config.mini_batch_size,
            seed=config.train.seed,
            max_rows=max(1, (config.max_rows_per_micro_batch() or config.mini_batch_size) >> self.halvings),
            max_tokens=config.train.max_tokens_per_micro_batch,
        )
        own, most = list(self.dist.dealt(batches)), len(self.dist.dealt(batches, to=0))
        empty = replace(batches[0], response_mask=torch.zeros_like(batches[0].response_mask), is_idle=True)
        idle = [empty] * (most - len(own))
        return [*own, *idle], float(sum(batch.num_response_tokens for batch in batches))

    def imitate(self, batch: MicroBatch, num_tokens: float, optimizer: PassOptimizer) -> None:
        """Adds the gradient of the SFT loss on demonstrations.

            ptx_coef · Σ over their response tokens of −log π / num_tokens

        Args:
            num_tokens: number of response tokens in all demonstrations of the mini-batch.
        """
        (policy_pass,) = (pass_ for pass_ in self.roles.passes if POLICY in pass_.trains)
        batch = batch.to(self.dist.device)
        with policy_pass(batch, temperature=1.0) as out:
            self.metrics.mean("loss/ptx_avg", -out.logprobs.detach(), batch.response_mask)
            loss = -algo.masked_sum(out.logprobs, batch.response_mask) / num_tokens
            self.engine.backward(optimizer.scaled(self.config.ppo.ptx_coef * loss), policy_pass.name)
        self.costs.count(self.metrics, policy_pass, batch)

    def losses(self, new: LogprobOutput, old: Experience, drift: Metrics, *, is_first: bool) -> dict[str, Tensor]:
        """Per-token losses, [M, R], of this pass's outputs.

        Args:
            drift: receives measurements of how far the policy has moved.
            is_first: whether this is the update's first mini-batch.
        """
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
            if old.importance is not None:
                losses["policy_loss"] = old.importance * losses["policy_loss"]
            if old.ref_logprobs is not None:
                losses["kl_loss"] = algo.kl_loss(new.logprobs, old.logprobs, old.ref_logprobs, ppo.kl_estimator)
                self.metrics.mean("loss/kl_avg", losses["kl_loss"].detach(), mask)
            if new.entropy is not None:
                losses["entropy"] = new.entropy
            self.metrics.mean("loss/policy_avg", losses["policy_loss"].detach(), mask)
            measure_policy(self.metrics, new.logprobs.detach(), old, ppo, is_first=is_first)
            drift.mean("approx_kl", algo.approx_kl(new.logprobs.detach(), old.logprobs), mask)
            drift.mean("ratio", algo.ratio(new.logprobs.detach(), old.logprobs), mask)
        if new.values is not None:
            clip = {"cliprange_value": ppo.cliprange_value}
            losses["value_loss"] = algo.value_loss(new.values, old.values, old.returns, **clip)
            clipped = algo.value_clipped(new.values.detach(), old.values, old.returns, **clip)
            self.metrics.mean("loss/value_avg", losses["value_loss"].detach(), mask)
            self.metrics.mean("val/clipfrac_avg", clipped, mask)
        return losses

    def is_too_far(self, drift: Metrics) -> bool:
        """Whether the policy has moved away from the sampling policy further than ``max_approx_kl`` or ``max_ratio``
        allow."""
        ppo = self.config.ppo
        limits = {"approx_kl": ppo.max_approx_kl, "ratio": ppo.max_ratio}
        if all(limit is None for limit in limits.values()):
            return False
        moved = self.dist.computed(drift)
        if not moved:  # no token took part
            return False
        return any(limit is not None and moved[name] > limit for name, limit in limits.items())

    def take_step(self, optimizer: PassOptimizer) -> None:
        """Takes one optimizer step with the gradient norm clipped."""
        self.metrics.value("lr" if optimizer.name == POLICY else f"{optimizer.name}/lr", optimizer.learning_rate)
        with self.metrics.known():
            self.metrics.mean(f"{optimizer.name}/grad_norm", self.engine.step(optimizer))

    def rescale(self, optimizer: PassOptimizer, gradients: Gradients | None) -> None:
        """Adjusts the loss scale to the outcome of a mini-batch; None for one that was skipped."""
        scale = optimizer.loss_scale
        if scale is None or gradients is None:
            return
        self.metrics.value(f"{optimizer.name}/loss_scale", scale.scale)
        with self.metrics.known():
            self.metrics.sum(f"{optimizer.name}/num_overflows", float(gradients is Gradients.OVERFLOWED))
        if gradients is Gradients.OVERFLOWED:
            scale.overflowed()
        elif gradients is Gradients.FIT:
            scale.took_step()

    @property
    def passes(self) -> list[Pass]:
        """The passes of this update: not a pass for the policy alone during critic warm-up."""
        return [p for p in self.roles.passes if VALUE in p.trains or not self.is_warming_up]

    def passes_of(self, optimizer: PassOptimizer) -> list[Pass]:
        """The passes whose gradients an optimizer uses: its own, or all if there is only one optimizer."""
        return self.passes if len(self.optimizers) == 1 else [p for p in self.passes if p.name == optimizer.name]

    def optimizers_in_use(self) -> list[PassOptimizer]:
        """The optimizers of this update's passes."""
        names = {pass_.name for pass_ in self.passes}
        return [optimizer for optimizer in self.optimizers if optimizer.name in names]


def num_places(item: Experience) -> int:
    """Number of tokens in a micro-batch, including padding."""
    return item.batch.token_ids.numel()
