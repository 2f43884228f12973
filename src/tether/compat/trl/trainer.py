"""TRL's ``PPOTrainer`` with its signature, built on Tether's phases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed, trainer_pt_utils

from tether.algo import ScoreMoments
from tether.compat.trl import hub
from tether.compat.trl.arguments import check_kinds, policy_adapter, stop_of
from tether.compat.trl.config import INERT, PPOConfig, check_arguments, check_evaluation, derive, run_config
from tether.compat.trl.data import prompts_of
from tether.compat.trl.events import Events, LoggedDisplay, PushedSaves, ShownSamples, default_callbacks
from tether.compat.trl.following import FOLLOWED, Changes
from tether.compat.trl.former import OF_TRAINER, no_attribute, telling
from tether.compat.trl.models import (
    Models,
    check_pass,
    check_positions,
    check_tokens,
    check_vocabularies,
    inside,
    name_of,
)
from tether.compat.trl.optimizers import check_optimizers, optimizers_of
from tether.compat.trl.rewards import Judges, WithoutEnd
from tether.compat.trl.samples import print_table, send_table
from tether.config.chat import present, with_now
from tether.config.keys import counted
from tether.config.load import parse_config
from tether.config.schema import RunConfig
from tether.data.prompts import PromptData
from tether.errors import ConfigError
from tether.generation.build import build_generator
from tether.machine.claim import claimed
from tether.machine.distributed import Dist
from tether.metrics.trackers import Trackers
from tether.models.checkpoints import check_models_kept, holds_run
from tether.models.device import half_dtype
from tether.models.layers import num_rows
from tether.models.roles import REFERENCE
from tether.models.saving import check_can_be_made, policy_weights, save_policy, written_into
from tether.models.stop_strings import continued
from tether.report.card import write_card
from tether.report.html import write_report
from tether.train import evaluate as evaluation
from tether.train.callbacks import callbacks_of
from tether.train.checkpoint import find_checkpoint, kept_whole, read_state
from tether.train.display import NullDisplay
from tether.train.engines.build import build_engine
from tether.train.engines.deepspeed import Zero
from tether.train.engines.fsdp import FullySharded
from tether.train.folder import CONFIG, FOLDERS, begun_at, check_files, prepare_folder
from tether.train.inputs import place_digests
from tether.train.log import RunLog
from tether.train.optim import check_schedule
from tether.train.parts import Parts
from tether.train.rollout import answer
from tether.train.run import check_processes
from tether.train.same_run import check_same_data, check_same_run, fingerprints, told_of_move
from tether.train.sharing import shared, shared_generator
from tether.train.trainer import PPOTrainer as PhaseTrainer
from tether.types import Request, Sampling, noise_key

logger = logging.getLogger(__name__)

SHOWN_TEMPERATURE = 0.01
"""Temperature of ``generate_completions``, nearly greedy, as in TRL."""
SHOWN_ROWS = 5


class PolicyAndValue(nn.Module):
    """The two trained models, like TRL's ``trainer.model``."""

    is_gradient_checkpointing = False
    """What TRL's ``unwrap_model_for_generation`` asks for: nothing needs to be turned off to generate."""

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        self.policy, self.value_model = policy, value_model
        self.config = policy.config


class PPOTrainer:
    """Trains ``model`` by PPO, in place. The arguments are those of TRL 1.12, in its order; docs/from_trl.md lists the
    differences.

    Args:
        args: the configuration.
        processing_class: the policy's tokenizer.
        model: the policy, a causal language model or a PEFT model of one with LoRA.
        ref_model: the reference. None: the start policy.
        reward_model: a sequence classifier with one label, the path of one, a function ``f(prompts, completions,
            **columns)``, or a list of these, whose scores are added up.
        train_dataset: rows with ``input_ids``, or with a ``prompt`` or ``messages``.
        value_model: the critic, a sequence classifier with one label.
        data_collator: makes a batch of one row, whose ``input_ids`` are taken; called once per row.
        eval_dataset: held-out rows of the same form, for evaluation by ``eval_strategy``; some of them are shown.
        optimizers: an optimizer of policy and critic, and its schedule, which advances once per update.
        callbacks: list of ``transformers`` callbacks, objects or classes; one step is one update.
        peft_config: LoRA settings; the policy's adapter is then created here.

    Raises:
        ConfigError, DataError, ModelError: an argument is invalid; states what is expected. Nothing has changed then.
    """

    @telling(OF_TRAINER, "PPOTrainer")
    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: Any,
        ref_model: Any,
        reward_model: Any,
        train_dataset: Any,
        value_model: Any,
        data_collator: Callable[..., Any] | None = None,
        eval_dataset: Any = None,
        optimizers: Any = (None, None),
        callbacks: Any = None,
        peft_config: Any = None,
    ) -> None:
        check_kinds(args, processing_class, data_collator)
        check_arguments(args)
        check_can_be_made(Path(args.output_dir), "PPOConfig.output_dir")
        self.args, self.processing_class = args, processing_class
        self.train_dataset, self.eval_dataset, self.data_collator = train_dataset, eval_dataset, data_collator
        judges = Judges(reward_model)
        adapter = policy_adapter(args, model)
        models = Models(model, ref_model, inside(value_model), peft_config, adapter, args.ref_adapter_name)
        models.check(list(judges.models.values()))
        self._dist = dist = Dist(args.ddp_timeout)
        now = dist.by_main(lambda: begun_at(Path(args.output_dir)) or present())
        prompts = self._prompts(train_dataset, "train_dataset", now)
        self._held_out = None if eval_dataset is None else self._prompts(eval_dataset, "eval_dataset", now)
        read = models.read | {f"reward_model {name}": model for name, model in judges.models.items()}
        check_vocabularies(read, processing_class)
        self._sources = {name: name_of(model) for name, model in read.items()} | judges.paths
        sizes = {name: num_rows(model) for name, model in read.items()}
        self._check = partial(self._check_data, read, sizes, judges, now)
        for data in (prompts, self._held_out):
            if data is not None:
                self._check(data)
        told = check_evaluation(args, has_data=self._held_out is not None)
        for line in told + derive(args, len(prompts.prompts), dist.num_processes):
            logger.warning(line)
        stop_token, stops = stop_of(args, processing_class, models.base)
        self._describe = describe = partial(
            run_config,
            model_path=name_of(models.base),
            lora=models.lora,
            rewards=judges.sections(args.local_rollout_forward_batch_size),
            num_prompts=len(prompts.prompts),
            evaluates=self._evaluates,
            stop_token=stop_token,
            value_kind="head" if models.shares_trunk else "model",
        )
        self._config = config = with_now(describe(args), now)
        check_schedule(config, args.num_total_batches)
        check_processes(config, dist)
        models.check_passes(half_dtype(config.train, dist.device))
        for name, judge in judges.models.items():
            check_pass(judge.base_model, f"reward_model {name}", None)
        self._engine = build_engine(dist)
        check_optimizers(optimizers, self._engine)
        events = default_callbacks(args, callbacks_of(callbacks))
        if inert := sorted(INERT & args.set_arguments):
            logger.warning(
                "PPOConfig: these arguments have no effect here, whatever they are set to: %s. %s says why",
                ", ".join(inert),
                "docs/from_trl.md",
            )

        # From here on the models change.
        set_seed((args.seed + dist.rank) % 2**32)
        self._build(models, judges, prompts, stops, optimizers)
        self._phases: PhaseTrainer | None = None
        self._changes = Changes(args, describe)
        self._has_one_optimizer = optimizers[0] is not None or models.shares_trunk
        self.train_dataset_len, self.stop_token_id = len(prompts.prompts), next(iter(stops), None)
        self._show(reward_model, value_model, ref_model)
        self._events = Events(
            events,
            args,
            self._config,
            len(prompts.prompts),
            model=self.model,
            log=lambda logs: self.log(logs),
            changes=self._changes,
            follow=lambda: self._follow(),
        )
        self._attach()

    def _prompts(self, dataset: Any, name: str, now: str) -> PromptData:
        """The rows of the dataset under an argument's ``name`` as prompts, with the date and time of the run."""
        return prompts_of(dataset, self.processing_class, self.data_collator, name, now)

    def _check_data(
        self,
        read: Mapping[str, PreTrainedModel],
        sizes: Mapping[str, int],
        judges: Judges,
        now: str,
        prompts: PromptData,
    ) -> None:
        """Checks that need both prompts and models."""
        longest = prompts.longest_query
        check_positions(read, longest, self.args.response_length)
        check_tokens(sizes, self.processing_class, prompts.prompts)
        judges.check_columns(prompts.columns)
        judges.check_conversations(prompts.prompts, self.processing_class, now)

    @property
    def _evaluates(self) -> bool:
        """Whether held-out prompts are answered during training."""
        return self._held_out is not None and self.args.eval_strategy.value != "no"

    def _build(
        self, models: Models, judges: Judges, prompts: PromptData, stops: frozenset[int], optimizers: Any
    ) -> None:
        """Places the models, and builds what the phases of an update need."""
        args, config, dist, engine = self.args, self._config, self._dist, self._engine
        self._rewards = rewards = judges.source(
            self.processing_class,
            batch_size=args.local_rollout_forward_batch_size,
            device=dist.device,
            now=config.data.chat_template_now,
            shards=engine.spreads_weights,
            shared=partial(shared, dist=dist, engine=engine),
        )
        device = torch.device("cpu") if engine.spreads_weights else dist.device
        self._roles = roles = models.roles(config, self.processing_class, device=device)
        before = roles.trained
        engine.place(roles)
        if not stops:
            end_id = self.processing_class.eos_token_id
            rewards = WithoutEnd(rewards, end_id=end_id, penalty=lambda: args.missing_eos_penalty)
        self._optimizers = optimizers_of(optimizers, config, roles, args.num_total_batches, before, args.vf_coef)
        engine.prepare(self._optimizers)
        gather = config.train.ds3_gather_for_generation
        self._parts = Parts(
            roles=roles,
            generator=shared_generator(build_generator(config, roles), dist, engine, gather=gather),
            rewards=rewards,
            tokenizer=self.processing_class,
            sampling=Sampling(args.response_length, args.temperature, stops),
            prompts=prompts.prompts,
            eval_prompts=self._held_out.prompts if self._evaluates else [],
            dist=dist,
            engine=engine,
        )

    def _show(self, reward_model: Any, value_model: Any, ref_model: Any) -> None:
        """Sets the attributes under which scripts find the models."""
        roles = self._roles
        self.policy_model, self.value_model, self.reward_model = roles.policy, value_model, reward_model
        self.model = PolicyAndValue(self.policy_model, self.value_model)
        self.is_peft_model = isinstance(self.policy_model, PeftModel)
        self.ref_model = None if self.is_peft_model and ref_model is None else ref_model
        if not self.is_peft_model and roles.has_reference:
            self.ref_model = roles.role(REFERENCE).model
        self.accelerator = self._dist.accelerator

    def _attach(self) -> None:
        """Tells the callbacks what they act on, and adds those that the arguments ask for."""
        args, dist = self.args, self._dist
        self.state.is_world_process_zero, self.state.is_local_process_zero = dist.is_main, self.is_local_process_zero()
        self._events.attach(self.policy_model, self.processing_class)
        self._events.given = {"optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        if args.num_sample_generations > 0 and self._held_out is not None:
            show = lambda: self.generate_completions(sampling=True)  # noqa: E731
            self.add_callback(ShownSamples(args.num_sample_generations, show))
        self.hub_model_id = dist.by_main(lambda: hub.open_repository(args)) if args.push_to_hub else None
        if args.push_to_hub and args.hub_strategy.value == "every_save":
            self.add_callback(PushedSaves(lambda message: self.push_to_hub(commit_message=message)))

    # What scripts read

    @property
    def state(self) -> Any:
        """Step, episode, ``log_history`` and the like, as ``transformers`` has them."""
        return self._events.state

    @property
    def control(self) -> Any:
        """The requests of callbacks."""
        return self._events.control

    @property
    def optimizer(self) -> Any:
        """The policy's optimizer."""
        return self._optimizers[0].optimizer

    @property
    def lr_scheduler(self) -> Any:
        """Schedule of the policy's learning rate."""
        return self._optimizers[0].scheduler

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed shards the weights, as set by the launcher."""
        return isinstance(self._engine, Zero)

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether FSDP2 shards the weights, as set by the launcher."""
        return isinstance(self._engine, FullySharded)

    def __getattr__(self, name: str) -> Any:
        """Raises an error that names the replacement of an attribute of ``transformers.Trainer``."""
        raise no_attribute(name)

    def is_world_process_zero(self) -> bool:
        """Whether this process writes files and prints."""
        return self._dist.is_main

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first on its machine."""
        return self.accelerator.is_local_main_process

    # Callbacks

    def add_callback(self, callback: Any) -> None:
        """Adds a ``transformers`` callback, an object or a class.

        Raises:
            ConfigError: it is something else.
        """
        self._events.callbacks += callbacks_of([callback])

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Removes a callback, or the first one of a class, and returns it; None if there is none."""
        for each in self._events.callbacks:
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                self._events.callbacks.remove(each)
                return each
        return None

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Removes a callback, or the first one of a class."""
        self.pop_callback(callback)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Appends metrics to ``state.log_history`` and calls the callbacks, including trackers.

        Args:
            start_time: not read; ``transformers`` has it in its signature.
        """
        logs = dict(logs)
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._events.call("on_log", logs=logs)

    # The run

    def train(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Trains. metrics.jsonl, samples.jsonl, config.yaml, report.html and checkpoints go to ``args.output_dir``.

        Args:
            resume_from_checkpoint: a checkpoint to resume from, or True for the newest. Default: that of ``args``.

        Raises:
            ConfigError: ``output_dir`` holds something that no run of Tether wrote, or a model that this run was given.
            CheckpointError: there is no such checkpoint, or it belongs to another run.
            RewardError, GenerationError, TrainingError: the run could not continue; its last checkpoint is intact.
            KeyboardInterrupt: the run was stopped by Ctrl-C, SIGTERM or SIGHUP; its state is saved.
        """
        if self._phases is not None:
            raise ConfigError("train: this trainer has already trained; create a new one to continue")
        self._follow(begins=True)
        dist = self._dist
        display = LoggedDisplay() if dist.is_main else NullDisplay()
        config = dist.by_main(lambda: self._resumed(resume_from_checkpoint))
        dist.by_main(lambda: self._check_folder(config.output_dir))
        checkpoint = dist.by_main(lambda: find_checkpoint(config, tell=display.message))
        places, parts = dist.each(lambda: place_digests(config)), self._parts
        read = fingerprints(parts.prompts, parts.eval_prompts, parts.demonstrations, places)
        if checkpoint is not None:
            self._check_resumed(config, checkpoint, read, display)
        folder = config.output_dir
        with ExitStack() as stack:
            dist.by_main(lambda: stack.enter_context(claimed(folder)))
            # model.path is that of the base, if it has any, and model.lora has all settings of the adapter
            dist.by_main(lambda: prepare_folder(config, checkpoint, continues=False, tell=display.message))
            log = RunLog(folder if dist.is_main else None, display, Trackers("none", "", folder, {}), logging_steps=1)
            try:
                self._phases = phases = PhaseTrainer(
                    config, parts, read=read, log=log, callbacks=self._events, optimizers=self._optimizers
                )
                if checkpoint is not None:
                    phases.resume(checkpoint)
                    self._follow()
                interrupted = phases.fit()
            finally:
                log.close()
            dist.by_main(lambda: write_report(folder))
        if interrupted is not None:
            raise KeyboardInterrupt(
                f"{interrupted}: stopped after {counted(phases.state.step, 'update')}, and the state is saved; "
                f"train(resume_from_checkpoint=True) resumes it"
            )

    def _follow(self, *, begins: bool = False) -> None:
        """Lets the next updates follow what the script has changed in the arguments, in the main process.

        Args:
            begins: whether the run has not begun.

        Raises:
            ConfigError: an argument is invalid, or cannot be followed.
        """
        self._changes.make(self._dist.by_main(lambda: self._changes.read(begins=begins)))
        now = self._describe(self.args).ppo
        ppo = self._config.ppo.model_copy(update={name: getattr(now, name) for name in FOLLOWED})
        self._config = self._config.model_copy(update={"ppo": ppo})
        if self._phases is not None:
            self._phases.follow(ppo)
        if self._has_one_optimizer:
            self._optimizers[0].value_weight = self.args.vf_coef

    def _check_folder(self, folder: Path) -> None:
        """Raises ``ConfigError`` if the run would remove or overwrite something that no earlier run in the folder
        wrote."""
        check_models_kept(folder, self._sources, also=FOLDERS)
        check_files(folder, is_new=not holds_run(folder), way_out="remove it")

    def _check_resumed(
        self, config: RunConfig, checkpoint: Path, read: Mapping[str, str], display: NullDisplay
    ) -> None:
        """Raises ``CheckpointError`` if the checkpoint belongs to another run; states what differs.

        Args:
            read: ``fingerprints`` of this run.
        """
        record = read_state(checkpoint)
        saved = parse_config(record["config"], RunConfig)
        # Whether the chat template prints a date at all shows in the fingerprints of the prompts.
        data = saved.data.model_copy(update={"chat_template_now": config.data.chat_template_now})
        saved = saved.model_copy(update={"data": data})
        self._dist.each(lambda: check_same_run(saved, config, checkpoint, record["data"], read))
        self._dist.each(lambda: check_same_data(record["data"], read, checkpoint))
        if (told := told_of_move(saved, record, config, self._dist, self._engine.name)) is not None:
            display.message(told)

    def _resumed(self, asked: str | bool | None) -> RunConfig:
        """The configuration, with its settings for an earlier run in its folder."""
        resume = self.args.resume_from_checkpoint if asked is None else asked
        is_again = not resume and holds_run(self._config.output_dir)
        return self._config.model_copy(update={"resume": resume or False, "overwrite_output_dir": is_again})

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Answers and scores held-out prompts at the training temperature; returns and logs the metrics.

        Args:
            eval_dataset: rows as for ``PPOTrainer``, or several such datasets by name, which then follows the prefix.
                Default: the trainer's.
            ignore_keys: not read; ``transformers`` has it in its signature.
            metric_key_prefix: prefix of the metrics' names.

        Raises:
            ConfigError: there is no ``eval_dataset``.
            DataError: a row is invalid.
        """
        if isinstance(eval_dataset, Mapping):
            several = [self.evaluate(rows, None, f"{metric_key_prefix}_{name}") for name, rows in eval_dataset.items()]
            return {name: value for metrics in several for name, value in metrics.items()}
        if eval_dataset is not None:
            now = self._config.data.chat_template_now
            held_out = self._prompts(eval_dataset, "eval_dataset", now)
            self._check(held_out)
        elif (held_out := self._held_out) is None:
            raise ConfigError("evaluate: there is no eval_dataset; give one to PPOTrainer")
        parts = replace(self._parts, eval_prompts=held_out.prompts)
        shown, check = NullDisplay().phase, lambda: None
        metrics, *_ = evaluation.evaluate(parts, self._config, ScoreMoments(), phase=shown, check=check)
        if held_out is self._held_out and metric_key_prefix == "eval":
            self._events.evaluated(metrics)
            return metrics
        metrics = {f"{metric_key_prefix}_{name.removeprefix('eval_')}": value for name, value in metrics.items()}
        self._events.record(metrics)
        self._events.call("on_evaluate", metrics=dict(metrics))
        return metrics

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Prints a table of nearly greedy answers to held-out prompts with their scores, and sends it to Weights &
        Biases if ``report_to`` names it.

        Args:
            sampling: whether to answer only ``per_device_eval_batch_size`` prompts.

        Returns:
            Rows with ``query``, ``model response`` and ``score``; empty without an ``eval_dataset``.
        """
        if self._held_out is None:
            return []
        prompts = self._held_out.prompts[: self.args.per_device_eval_batch_size if sampling else None]
        requests = [
            Request(prompt.token_ids, noise_key(self.args.seed, "completions", prompt.row, 0), prompt.before)
            for prompt in prompts
        ]
        parts = replace(self._parts, sampling=replace(self._parts.sampling, temperature=SHOWN_TEMPERATURE))
        answers = answer(parts, prompts, requests, phase=NullDisplay().phase, check=lambda: None)
        scores = self._rewards.score(answers.reward_batch(self.processing_class)).scores
        decode = self.processing_class.decode
        rows = [
            {
                "query": decode(prompt.token_ids, skip_special_tokens=True),
                "model response": continued(
                    completion.token_ids, prompt.before, self.processing_class, skip_special_tokens=False
                ),
                "score": score,
            }
            for prompt, completion, score in zip(prompts, answers.completions, scores, strict=True)
        ]
        if self._dist.is_main:
            print_table(rows[:SHOWN_ROWS])
            if "wandb" in self.args.report_to:
                send_table(rows)
        return rows

    # Output

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Writes the policy with its tokenizer, as a full model or a PEFT adapter; also pushes it if
        ``args.push_to_hub``.

        All processes must call it; the main one writes.

        Args:
            output_dir: target folder. Default: ``args.output_dir``.

        Raises:
            ConfigError: it is a file, or cannot be made.
        """
        folder = Path(output_dir or self.args.output_dir)
        self._dist.by_main(lambda: check_can_be_made(folder, "output_dir"))
        weights = kept_whole(self._engine, policy_weights, self._roles)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with written_into(folder) as temporary:
                save_policy(self._roles, self.processing_class, temporary, weights)
                write_card(temporary, Path(self.args.output_dir), command=hub.COMMAND)

        self._dist.by_main(write)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def save_state(self) -> None:
        """Writes ``state`` to trainer_state.json in ``args.output_dir``, as ``transformers`` does."""
        self._write(trainer_pt_utils.save_state)

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Writes metrics to ``{split}_results.json`` in ``args.output_dir``.

        Args:
            split: what they belong to: ``train``, ``eval``.
            combined: whether to add them to all_results.json as well.
        """
        self._write(trainer_pt_utils.save_metrics, split, dict(metrics), combined)

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Prints metrics as ``transformers`` does.

        Args:
            split: what they belong to: ``train``, ``eval``.
        """
        trainer_pt_utils.log_metrics(self, split, dict(metrics))

    def _write(self, write: Callable[..., None], *args: Any) -> None:
        """Lets a helper of ``transformers`` write to the output folder, in the main process."""
        if self._dist.is_main:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        write(self, *args)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> Path:
        """Writes README.md for a hub page to ``args.output_dir``; returns its path.

        Raises:
            ConfigError: nothing has been trained yet.
        """
        if not (Path(self.args.output_dir) / CONFIG).is_file():
            raise ConfigError(f"create_model_card: {self.args.output_dir} holds no run yet; train first")
        return hub.write_model_card(
            self.args,
            model_name=model_name,
            dataset_name=dataset_name,
            tags=[tags] if isinstance(tags, str) else list(tags or ()),
        )

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Saves the policy to ``args.output_dir`` and pushes it with its card, and nothing else of that folder.

        All processes must call it; the main one pushes, the others return None.

        Args:
            blocking: whether to wait for the upload; otherwise returns a future at once.
            token: token of the hub. Default: ``args.hub_token``, else that of the login.
            private: whether a newly created repository is private. Default: ``args.hub_private_repo``.
            kwargs: further arguments of ``create_model_card``.
        """
        if self.hub_model_id is None:
            self.hub_model_id = self._dist.by_main(lambda: hub.open_repository(self.args, token=token, private=private))
        self.save_model(_internal_call=True)
        if not self._dist.is_main:
            return None
        self.create_model_card(**kwargs)
        return hub.upload(
            self.args, self.hub_model_id, commit_message, blocking=blocking, token=token, revision=revision
        )
