"""What distributes a stage's model over processes: DDP, or DeepSpeed's ZeRO through TRL's trainers.

Under ZeRO, weights keep their type and forward passes run under autocast, as without it: DeepSpeed's own half precision
would round the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from accelerate.utils import convert_outputs_to_fp32
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tether.config import launched
from tether.config.stage import StageConfig
from tether.errors import ConfigError, OutOfStep
from tether.machine.deepspeed import gathered, load_whole, partition, plugin_of_launch
from tether.machine.deepspeed_config import check_deepspeed, filled, width_of
from tether.machine.distributed import Dist, lost_told
from tether.models.adapters import DEFAULT, adapter_parameters
from tether.models.device import half_dtype
from tether.models.paths import model_errors
from tether.models.roles import directly
from tether.models.saving import adapter_tensors

ArgumentsT = TypeVar("ArgumentsT", bound=TrainingArguments)
DDP = "DDP"
NOT_OURS = {
    "optimizer": "train.learning_rate and related keys set it",
    "scheduler": "train.lr_scheduler_type and train.warmup_ratio set it",
    "hybrid_engine": "no answers are decoded",
}
"""Sections of a DeepSpeed configuration that are decided by other keys of a run."""
BATCHES = {
    "train_batch_size": "train.batch_size sets it",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size sets it",
    "gradient_accumulation_steps": "train.batch_size and train.micro_batch_size set it",
}
"""Sizes that follow from a run's own."""


@runtime_checkable
class StageEngine(Protocol):
    """Distributes weights, gradients and optimizer states of the model that TRL's trainer trains. All processes must
    call every method."""

    name: str | None
    """Name of the engine: DDP, ZeRO-3, …; None for a single process."""
    shards: bool
    """Whether it shards anything, so that its checkpoints are resumed only by the same engine in as many processes."""
    in_step: bool
    """Whether weights are sharded, so that all processes take part in each forward pass."""

    def check(self, config: StageConfig) -> None:
        """Raises ``ConfigError`` for settings that the engine does not support; called before a model is loaded."""
        ...

    def arguments(self, precision: torch.dtype | None) -> dict[str, Any]:
        """Arguments of TRL's trainers that depend on the engine.

        Args:
            precision: the autocast dtype of forward passes, None without autocast.
        """
        ...

    def configured(self, arguments: ArgumentsT, model: PreTrainedModel | PeftModel) -> ArgumentsT:
        """The arguments of a trainer of ``model``, with what the engine adds to the objects that they hold."""
        ...

    def take(self, trainer: Trainer, precision: torch.dtype | None) -> None:
        """Takes over the model of a new trainer."""
        ...

    def host(self, compute: Callable[[], Any]) -> Any:
        """Returns ``compute()``, forward passes of the trainer's model."""
        ...

    def load(self, model: PreTrainedModel | PeftModel, checkpoint: Path) -> None:
        """Loads a checkpoint's weights at the end of training, into the model that they were saved from.

        Raises:
            ModelError: they cannot be read; the model is as it was.
        """
        ...

    def full(self, model: PreTrainedModel | PeftModel) -> dict[str, Tensor] | None:
        """What ``save_pretrained`` writes, put together on the CPU of the main process; the others may return less.
        None if the live model has all of it."""
        ...

    def close(self) -> None:
        """Frees what the engine holds; the model is not used any more."""
        ...


def stage_engine(dist: Dist) -> StageEngine:
    """The engine that the launch asks for.

    Raises:
        ConfigError: it cannot train a stage, or its configuration cannot be read.
    """
    if launched.uses_fsdp():
        raise ConfigError(
            "the launcher's configuration asks for FSDP, with which tether sft and tether reward do not train; wanted "
            "DeepSpeed's ZeRO, which shards weights as well (examples/accelerate/zero3.yaml), or DDP (ddp.yaml there, "
            "torchrun)"
        )
    return Zero(dist) if launched.uses_deepspeed() else Replicated(dist)


class Replicated:
    """All weights in every process: DDP if there are several."""

    shards = in_step = False

    def __init__(self, dist: Dist) -> None:
        self._dist = dist
        self.name = DDP if dist.num_processes > 1 else None

    def check(self, config: StageConfig) -> None:
        """Nothing is refused."""

    def arguments(self, precision: torch.dtype | None) -> dict[str, Any]:
        """The trainer's own autocast."""
        return {"bf16": precision is torch.bfloat16, "fp16": precision is torch.float16}

    def configured(self, arguments: ArgumentsT, model: PreTrainedModel | PeftModel) -> ArgumentsT:
        """Nothing is added."""
        return arguments

    def take(self, trainer: Trainer, precision: torch.dtype | None) -> None:
        """Nothing is to be done."""

    def host(self, compute: Callable[[], Any]) -> Any:
        """Every process runs its own."""
        return directly(compute)

    def load(self, model: PreTrainedModel | PeftModel, checkpoint: Path) -> None:
        """Every process loads it."""
        self._dist.each(lambda: load_weights(model, checkpoint))

    def full(self, model: PreTrainedModel | PeftModel) -> None:
        """The live model has all of it."""

    def close(self) -> None:
        """Nothing is held."""


class Zero:
    """ZeRO at the stage given in the launcher's configuration.

    Raises:
        ConfigError: the configuration cannot be read.
    """

    shards = True

    def __init__(self, dist: Dist) -> None:
        load_whole()
        self._dist = dist
        self._config = plugin_of_launch().deepspeed_config
        self._stage = int(self._config["zero_optimization"]["stage"])
        self.name = f"ZeRO-{self._stage}"
        self.in_step = self._stage == 3
        self._settings: dict[str, Any] = {}
        self._trainer: Trainer | None = None

    def check(self, config: StageConfig) -> None:
        """Raises ``ConfigError`` if launcher and run contradict each other."""
        is_bf16 = half_dtype(config.train, self._dist.device) is torch.bfloat16
        config = config.model_copy(update={"train": config.train.model_copy(update={"bf16": is_bf16})})
        check_deepspeed(self._config, config, sections=NOT_OURS, batches=BATCHES)

    def arguments(self, precision: torch.dtype | None) -> dict[str, Any]:
        """Not the trainer's autocast, which would be DeepSpeed's half precision."""
        return {"bf16": False, "fp16": False}

    def configured(self, arguments: ArgumentsT, model: PreTrainedModel | PeftModel) -> ArgumentsT:
        """Fills in the launcher's configuration, which the arguments have read. Half precision is off in it, whatever
        the launcher says, and checkpoints hold whole weights at stage 3 too."""
        self._settings = filled(
            self._config,
            arguments.world_size,
            width_of(model),
            rows=arguments.per_device_train_batch_size,
            accumulation=arguments.gradient_accumulation_steps,
            max_grad_norm=arguments.max_grad_norm,
        )
        off = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
        zero = self._settings["zero_optimization"] | {"stage3_gather_16bit_weights_on_model_save": self._stage == 3}
        settings = arguments.deepspeed_plugin.deepspeed_config
        settings.clear()
        settings |= {**self._settings, **off, "zero_optimization": zero}
        return arguments

    def take(self, trainer: Trainer, precision: torch.dtype | None) -> None:
        """Puts the model's forward passes under autocast, and shards its weights at stage 3."""
        self._trainer, model = trainer, trainer.model
        forward = convert_outputs_to_fp32(model.forward)
        # without autocast's cache at stage 3: a cast in it would outlive the gathered weights it was made from
        half = partial(torch.autocast, self._dist.device.type, precision, cache_enabled=not self.in_step)

        @wraps(model.forward)
        def hosting(*args: Any, compute: Callable[[], Any] | None = None, **options: Any) -> Any:
            if compute is not None:
                return compute()
            with nullcontext() if precision is None else half():
                return forward(*args, **options)

        model.forward = hosting
        if self.in_step:
            partition(model, self._settings, self._dist.device)

    def host(self, compute: Callable[[], Any]) -> Any:
        """At stage 3, DeepSpeed acts before and after the forward of the whole model, which then is ``compute``."""
        if not self.in_step:
            return directly(compute)
        try:
            with lost_told(self._dist.num_processes):
                return self._trainer.model(compute=compute)
        except torch.OutOfMemoryError as error:  # a process by itself must not try again with fewer rows
            raise OutOfStep(
                f"out of memory in a forward pass, in which all processes take part ({error}): lower "
                "train.micro_batch_size"
            ) from error

    def load(self, model: PreTrainedModel | PeftModel, checkpoint: Path) -> None:
        """At stage 3, the main process loads it and hands on one parameter at a time, or a whole adapter."""
        load_whole()
        if not self.in_step:
            self._dist.each(lambda: load_weights(model, checkpoint))
            return
        if isinstance(model, PeftModel):
            with gathered(adapter_parameters(model, DEFAULT).values(), changed_by_main=True):
                self._dist.by_main(lambda: load_weights(model, checkpoint))
            return
        saved: dict[str, Tensor] = {}
        names = [name for name, _ in model.named_parameters()]
        self._dist.by_main(lambda: saved.update(read_weights(model, checkpoint, names)))
        for name, parameter in model.named_parameters():
            with gathered([parameter], changed_by_main=True):
                if self._dist.is_main:
                    parameter.data.copy_(saved.pop(name))

    def full(self, model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
        """Gathers one parameter at a time; shared tensors stay shared."""
        tensors = adapter_tensors(model, DEFAULT) if isinstance(model, PeftModel) else model.state_dict(keep_vars=True)
        whole: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}
        with lost_told(self._dist.num_processes):
            for name, x in tensors.items():
                if id(x) not in seen:
                    with gathered([x]):
                        own = x.detach() if self._dist.is_main else x.new_empty(0)
                        seen[id(x)] = own.to("cpu", copy=True)
                whole[name] = seen[id(x)]
        return whole

    def close(self) -> None:
        """Removes DeepSpeed's hooks, and the setting by which transformers would shard every model that it loads."""
        load_whole()
        trainer, self._trainer = self._trainer, None
        engine = getattr(trainer, "model_wrapped", None)
        if not hasattr(engine, "destroy"):  # it has not begun to train
            return
        sharded = list(_sharded(engine)) if self.in_step else []
        engine.destroy()
        for tensor in sharded:
            storage = tensor.untyped_storage()
            tensor.data = tensor.new_empty(0)
            if storage.resizable():  # other views of it would keep it; what was read from a checkpoint has none
                storage.resize_(0)


def _sharded(engine: Any) -> Iterator[Tensor]:
    """What a process keeps of a model that is trained at stage 3, and what it has gathered. DeepSpeed's own references
    to it outlive the engine, so the memory would not be free for what comes after."""
    zero = engine.optimizer
    for parameter in engine.module.parameters():
        yield from (parameter, parameter.ds_tensor)
    for flat in zero.fp32_partitioned_groups_flat:
        yield from (flat, *([] if flat.grad is None else [flat.grad]))
    for state in zero.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    if getattr(zero, "grad_partitions_flat_buffer", None) is not None:
        yield zero.grad_partitions_flat_buffer


def load_weights(model: PreTrainedModel | PeftModel, checkpoint: Path) -> None:
    """Loads a checkpoint's weights into the model it was saved from.

    Raises:
        ModelError: they cannot be read.
    """
    with model_errors(str(checkpoint)):
        if isinstance(model, PeftModel):
            model.load_adapter(str(checkpoint), DEFAULT)
        else:
            model.load_state_dict(read_weights(model, checkpoint, model.state_dict()))


def read_weights(model: PreTrainedModel, checkpoint: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """A checkpoint's weights by their names in ``model``, which may differ from those in a file.

    Raises:
        ModelError: they cannot be read.
    """
    with model_errors(str(checkpoint)):
        saved = type(model).from_pretrained(checkpoint, dtype="auto").state_dict()
        return {name: saved[name] for name in names}
