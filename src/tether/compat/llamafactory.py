"""LLaMA-Factory's files for the stages ppo, sft and rm, translated for Tether. The keys are those of releases 0.9.3 and
0.9.4, and some of earlier ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.compat.llamafactory_keys import (
    ATTENTION,
    FORMER,
    FORMER_ATTENTION,
    GONE,
    GROUPS,
    IGNORED,
    INVERTED,
    KEYS,
    KNOWN,
    NAMES,
    OFF,
    OTHER_TEMPLATES,
    PPO_KEYS,
    SFT_KEYS,
    TAKEN,
    TEMPLATES,
)
from tether.compat.table import ADAMW, ADAMW_8BIT, NAME, Key
from tether.compat.translation import Translation, Translator
from tether.config.launched import num_processes, uses_deepspeed, uses_fsdp
from tether.errors import ConfigError
from tether.report.plots import can_plot

SYSTEM = "LLaMA-Factory"
STAGES = {"ppo": "ppo", "sft": "sft", "rm": "reward"}
"""Our command for each stage."""


def recognised(data: Any) -> bool:
    """Whether a file's data are LLaMA-Factory's: flat keys, including ``stage`` or ``finetuning_type``."""
    return isinstance(data, dict) and "model" not in data and bool({"stage", "finetuning_type"} & data.keys())


WITHOUT_FSDP = (
    "this stage shards weights with DeepSpeed's ZeRO, or shares rows alone (DDP): remove this key, and start it with "
    "accelerate launch --config_file examples/accelerate/zero3.yaml"
)


def translated(
    source: str, given: Mapping[str, Any], origins: Mapping[str, str], *, to_file: bool = False
) -> tuple[str, Translation]:
    """Our command for the file, and its configuration.

    Args:
        source: the file, for messages.
        given: its keys with their values, including those of the command line.
        origins: where each key was set, for messages.
        to_file: whether a file of ours is made of it, and no run started.

    Raises:
        ConfigError: keys that would change the result have no counterpart here, or are unknown; names all of them.
    """
    stage = given.get("stage") or "sft"
    if not isinstance(stage, str) or stage not in STAGES:
        where = ", ".join(filter(None, (source, origins.get("stage"))))
        raise ConfigError(f"{where}: stage: got {stage}; Tether has the stages {', '.join(STAGES)}")
    names = FORMER | INVERTED
    given = {key: _opposite(value) if key in INVERTED else value for key, value in given.items()}
    spelled = {new: f"{new} (the opposite of {old})" for old, new in INVERTED.items() if old in given}
    spelled |= {new: old for old, new in FORMER.items() if old in given}
    given, origins = ({names.get(key, key): value for key, value in each.items()} for each in (given, origins))
    keys = Translator(source, SYSTEM, given, origins, spelled)
    for key, why in GONE.items():
        if keys.gives(key):
            keys.refuse(key, why)
    keys.single(*(key for key in TAKEN.split() if key not in (*NAMES, *GROUPS)))
    keys.single(*NAMES, names=True)
    keys.covered("stage", by=f"tether {STAGES[stage]}")
    for why, names in IGNORED.items():
        keys.ignore(why, *names.split())
    for why, usual in OFF.items():
        keys.off(why, **usual)
    _model(keys)
    _sharding(keys, stage, to_file=to_file)
    keys.need("output_dir", "a folder")
    keys.put_table(KEYS)
    keys.warmup()
    keys.put("train.max_grad_norm", keys.take("max_grad_norm", 1.0) or None, "max_grad_norm")
    {"ppo": _ppo, "sft": _sft, "rm": _reward}[stage](keys)
    _output(keys)
    return STAGES[stage], keys.finish(KNOWN)


def _opposite(value: Any) -> Any:
    return {"true": False, "false": True}.get(str(value).lower(), value)


# Common to all stages


def _model(keys: Translator) -> None:
    """The policy, or the model that is trained as a judge."""
    path, adapters = keys.take("model_name_or_path"), _names(keys.take("adapter_name_or_path"))
    fresh = keys.flag("create_new_adapter")
    if path is None:
        keys.refuse("model_name_or_path", "missing; wanted a hub id or the folder of a model")
    elif adapters and fresh:
        merges = " && ".join(f"tether merge {adapter} -o DIR" for adapter in adapters)
        keys.refuse(
            "create_new_adapter",
            f"merge what the new adapter is to be trained on, `{merges}`, name DIR as model_name_or_path, and remove "
            f"this key and {keys.name('adapter_name_or_path')}",
        )
    elif len(adapters) > 1:
        keys.refuse(
            "adapter_name_or_path",
            "only one adapter can be continued: merge the others into the model first, `tether merge ADAPTER -o DIR`, "
            "and name DIR as model_name_or_path",
        )
    elif adapters:
        keys.put("model.path", adapters[0], "adapter_name_or_path")
        keys.covered("model_name_or_path", "create_new_adapter", by="the adapter names its base")
        _check_base(keys, "adapter_name_or_path", adapters[0], path)
    else:
        keys.put("model.path", path, "model_name_or_path")
        keys.covered("create_new_adapter", by="model.lora")
    if keys.take("lora_dropout", 0.0) and keys.take("stage") == "ppo":
        keys.note("Dropout is off during PPO, so that the ratio starts at 1; in LLaMA-Factory it is on.")
    _method(keys, continues=bool(adapters))
    _attention(keys)
    keys.covered("flash_attn", by="its default, as here")
    _quantization(keys)


def _attention(keys: Translator) -> None:
    """The attention kernel; as in LLaMA-Factory, the model's default if FlashAttention-2 cannot be used."""
    kernel = keys.take("flash_attn", "auto")
    if isinstance(kernel, bool):
        kernel = FORMER_ATTENTION[kernel]
    if kernel not in ATTENTION:
        keys.refuse("flash_attn", f"wanted {', '.join(list(ATTENTION)[:-1])} or {list(ATTENTION)[-1]}")
    elif kernel == "fa2" and not _has_flash_attention():
        keys.covered("flash_attn", by="the model's default, as flash-attn is not installed or finds no GPU")
        keys.note(
            "FlashAttention-2 cannot be used here, so attention is the model's default, as in LLaMA-Factory; "
            "where it can, set model.attn_implementation: flash_attention_2."
        )
    elif ATTENTION[kernel] is not None:
        keys.put("model.attn_implementation", ATTENTION[kernel], "flash_attn")


def _has_flash_attention() -> bool:
    """Whether LLaMA-Factory would use FlashAttention-2 on this machine."""
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


def _check_base(keys: Translator, key: str, adapter: str, base: str) -> None:
    """Refuses a local adapter that was trained on a base other than the one the file names.

    Args:
        key: the key that names the adapter.
    """
    from tether.models.paths import is_same_model, own_weights

    if not Path(adapter, "adapter_config.json").is_file():
        return
    own, _ = own_weights(adapter)
    if not is_same_model(own, base):
        keys.refuse(
            key,
            f"its base is {own}, not {base}: if both are the same model, correct "
            "base_model_name_or_path in its adapter_config.json",
        )


def _method(keys: Translator, *, continues: bool) -> None:
    """LoRA, freeze or full fine-tuning."""
    method, is_ppo = keys.take("finetuning_type", "lora"), keys.take("stage") == "ppo"
    lora = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target")
    freeze = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
    if method == "lora" and continues:
        keys.put("model.lora", {}, "finetuning_type")
        keys.covered(*lora, by="the adapter that is continued has its own")
    elif method == "lora":
        rank, target = keys.number("lora_rank", 8), keys.take("lora_target", "all")
        keys.covered("finetuning_type", by="model.lora")
        keys.put("model.lora.r", rank, "lora_rank")
        keys.put("model.lora.alpha", keys.take("lora_alpha") or 2 * rank, "lora_alpha")
        keys.put("model.lora.target_modules", "all-linear" if target == "all" else _names(target), "lora_target")
        if keys.take("lora_dropout", 0.0):
            keys.put("model.lora.dropout", keys.take("lora_dropout"), "lora_dropout")
        keys.covered("lora_dropout", by="its default, as here")
    elif method == "full":
        keys.covered("finetuning_type", by="all weights are trained")
    elif method == "freeze" and is_ppo:
        _freeze(keys)
    elif method == "freeze":
        keys.refuse("finetuning_type", "layers are frozen in the stage ppo only: wanted lora or full")
        keys.ignore("for freeze only", *freeze)
    else:
        keys.refuse("finetuning_type", "wanted lora, freeze or full")
    if method != "lora":
        keys.ignore("for LoRA only", *lora)
    if method != "freeze":
        keys.ignore("for freeze only", *freeze)


def _freeze(keys: Translator) -> None:
    """Only the last layers are trained."""
    last, modules = keys.take("freeze_trainable_layers", 2), keys.take("freeze_trainable_modules", "all")
    if modules != "all" or keys.take("freeze_extra_modules") is not None or not isinstance(last, int) or last < 1:
        for key in ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"):
            if keys.gives(key):
                keys.refuse(key, "only whole layers, the last ones, can be trained: remove it, or use LoRA")
        return
    from tether.models.loading import load_config
    from tether.models.paths import check_model_path

    path, revision = str(keys.take("model_name_or_path")), keys.take("model_revision")
    check_model_path(path, "model_name_or_path", revision=revision)
    shape = load_config(path, revision=revision, trust_remote_code=keys.flag("trust_remote_code"))
    layers = shape.get_text_config().num_hidden_layers
    keys.put(
        "model.freeze_layers",
        max(0, layers - last),
        "finetuning_type",
        "freeze_trainable_layers",
        note=f"of {layers}; what follows the layers trains too",
    )
    keys.covered("freeze_trainable_modules", by="its default, as here")


def _quantization(keys: Translator) -> None:
    """Quantization."""
    if (bits := keys.take("quantization_bit")) is not None and keys.take("stage") != "ppo":
        keys.refuse("quantization_bit", "a quantized base is supported in the stage ppo only: remove this key")
    elif bits in (4, 8):
        keys.put("model.quantization", f"{bits}bit", "quantization_bit")
    elif bits is not None:
        keys.refuse("quantization_bit", "wanted 4 or 8")
    keys.off("models are quantized by bitsandbytes: remove this key", quantization_method=("bnb", "bitsandbytes"))
    keys.off("4-bit weights are of type nf4: remove this key", quantization_type="nf4")


def _sharding(keys: Translator, stage: str, *, to_file: bool) -> None:
    """DeepSpeed and FSDP, which are set by the launcher here, FSDP for PPO only; on one device they change nothing."""
    for key, is_launched in {"deepspeed": uses_deepspeed(), "fsdp": uses_fsdp()}.items():
        given = keys.take(key)
        if given and is_launched:
            keys.covered(key, by="the launcher's setting")
        elif given and num_processes() > 1 and to_file:
            keys.ignore(f"the launcher sets it: {_launch_to_shard(key, given, stage)}", key)
        elif given and num_processes() > 1 and key == "fsdp" and stage != "ppo":
            keys.refuse(key, WITHOUT_FSDP)
        elif given and num_processes() > 1:
            start = f"start {num_processes()} processes with {_launch_to_shard(key, given, stage)}"
            keys.refuse(key, f"the launcher sets it: remove this key and {start}")
        several = f"; on several the launcher sets it: {_launch_to_shard(key, given, stage)}" if to_file else ""
        keys.ignore(f"on one device there is nothing to shard{several}", key)


def _launch_to_shard(key: str, given: Any, stage: str) -> str:
    """The launch that shards as the key says, or with ZeRO in a stage without FSDP."""
    file = given if key == "deepspeed" and isinstance(given, str) else "FILE.json"
    said = f"--use_deepspeed --deepspeed_config_file {file}"
    if key == "fsdp":
        said = f"--config_file examples/accelerate/{'fsdp2' if stage == 'ppo' else 'zero3'}.yaml"
    command, count = "reward" if stage == "rm" else stage, num_processes() if num_processes() > 1 else "N"
    return f"accelerate launch {said} --num_processes {count} -m tether {command} …"


def _output(keys: Translator) -> None:
    """Where the result goes, other than its folder."""
    if keys.flag("push_to_hub") and keys.take("stage") == "ppo":
        keys.put("train.push_to_hub", True, "push_to_hub")
        keys.put("train.hub_private_repo", keys.flag("hub_private_repo"), "hub_private_repo")
        if keys.gives("hub_model_id"):
            keys.put("train.hub_model_id", keys.take("hub_model_id"), "hub_model_id")
    else:
        keys.off("push the folder afterwards: `tether push DIR`", push_to_hub=False)
    keys.ignore("for push_to_hub only", "hub_model_id", "hub_private_repo")
    if keys.flag("plot_loss"):
        if not can_plot():
            reason = "report.html has every curve; PNG files need matplotlib, pip install 'tether[plot]'"
            keys.ignore(reason, "plot_loss")
        else:
            keys.plots = True
            keys.covered("plot_loss", by="the curves as PNG files in output_dir")
    keys.covered("plot_loss", by="its default, as here")


def _chat(keys: Translator) -> None:
    """The template."""
    template = keys.take("template")
    if template in TEMPLATES:
        keys.put("data.chat_template", TEMPLATES[template], "template")
    elif template in OTHER_TEMPLATES.split():
        _own_template(keys)
    elif template is not None:
        close = difflib.get_close_matches(str(template), [*TEMPLATES, *OTHER_TEMPLATES.split()], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        keys.refuse(
            "template",
            f"LLaMA-Factory has no such template; {hint}Without this key, the tokenizer's own template is used",
        )


def _own_template(keys: Translator) -> None:
    """A template that has no name here: the model's own takes its place, if it has one."""
    from tether.models.paths import check_model_path
    from tether.models.tokenizer import load_tokenizer

    adapters = _names(keys.take("adapter_name_or_path"))
    key = "adapter_name_or_path" if adapters else "model_name_or_path"
    path, revision = adapters[0] if adapters else keys.take(key), keys.take("model_revision")
    if path:
        check_model_path(str(path), key, revision=revision)
    origin = {"revision": revision, "trust_remote_code": keys.flag("trust_remote_code")}
    if path and load_tokenizer(str(path), **origin).chat_template:
        keys.put("data.chat_template", "auto", "template", note="the model's own")
    else:
        keys.refuse("template", f"wanted one of {', '.join(TEMPLATES)}, as the model's tokenizer has no chat template")


def _datasets(keys: Translator, ours: str, held_out: str) -> None:
    """The datasets by their names in dataset_info.json, or by their hub ids.

    Args:
        ours: our key of the training data, without ``data.``.
        held_out: our key of the held-out data, likewise.
    """
    folder = str(keys.take("dataset_dir", "data"))
    keys.need("dataset", "names of datasets in dataset_info.json")
    keys.put(f"data.{ours}", _names(keys.take("dataset")), "dataset")
    if folder.startswith("REMOTE:"):
        keys.refuse("dataset_dir", "download the repository, and name its folder")
    else:
        keys.put("data.dataset_dir", folder, "dataset_dir")
    if keys.gives("eval_dataset"):
        keys.put(f"data.{held_out}", _names(keys.take("eval_dataset")), "eval_dataset")
    share = keys.number("val_size", 0.0)
    if share >= 1:
        keys.refuse("val_size", "wanted the share that is held out, below 1")
    elif share:
        keys.put("data.eval_fraction", share, "val_size")
    keys.covered("val_size", by="its default, as here")


def _names(value: Any) -> list[str]:
    """The items of a comma-separated list."""
    parts = value if isinstance(value, list) else str(value or "").split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _optim(keys: Translator, names: Mapping[str, str]) -> None:
    """The optimizer, if it is AdamW."""
    optim = keys.take("optim")
    if optim not in (None, *names):
        keys.refuse("optim", f"wanted one of {', '.join(names)}, or remove this key")
    elif optim is not None and names is not ADAMW:
        keys.put("train.optim", names[optim], "optim")
    keys.covered("optim", by="AdamW, as here")


# The stage ppo


def _ppo(keys: Translator) -> None:
    """Where the file does not decide, their trainer behaves like that of TRL 0.9.6, on which it is built."""
    keys.put_table(PPO_KEYS)
    _reference(keys)
    _reward_source(keys)
    keys.put("value.kind", "head", note="a head on the policy, as in LLaMA-Factory")
    _datasets(keys, "prompts", "eval_prompts")
    _chat(keys)
    keys.put("data.max_prompt_length", keys.take("cutoff_len", 2048), "cutoff_len", note="longer ones are dropped")
    _sampling(keys)
    keys.put("ppo.kl_coef", 0.2)
    keys.put("ppo.max_ratio", 10.0, note="above it LLaMA-Factory skips the mini-batch; here the update ends")
    _ppo_batches(keys)
    _optim(keys, ADAMW | ADAMW_8BIT)
    _ppo_logging(keys)
    keys.ignore("for sft and rm only", "train_on_prompt", "mask_history", "packing", "neat_packing")
    keys.ignore("prompts are shuffled, and padding costs nothing here", "disable_shuffling", "group_by_length")
    keys.note("Log-probabilities are at the temperature of sampling; LLaMA-Factory's are at temperature 1.")


def _reference(keys: Translator) -> None:
    """Theirs is the base with its adapters off; ours is the start policy, so that the KL starts at 0."""
    start = [keys.take("model_name_or_path"), keys.take("adapter_name_or_path")]
    if keys.gives("ref_model") and [keys.take("ref_model"), keys.take("ref_model_adapters")] != start:
        for key in ("ref_model", "ref_model_adapters"):
            if keys.gives(key):
                keys.refuse(key, "the reference is the policy that the run starts from: remove this key")
    keys.covered("ref_model", "ref_model_adapters", by="the policy that the run starts from")
    keys.ignore("the reference shares the policy's base", "ref_model_quantization_bit")
    if keys.gives("adapter_name_or_path") and not keys.gives("ref_model"):
        keys.note("The reference is the adapter that the run starts from; LLaMA-Factory's is the base without it.")


def _reward_source(keys: Translator) -> None:
    """The single reward model, which is of one of their three kinds."""
    kind, path = keys.take("reward_model_type", "lora"), keys.take("reward_model")
    adapters = _names(keys.take("reward_model_adapters")) if kind == "full" else []
    if path is None:
        keys.refuse("reward_model", "missing; wanted the folder of a reward model, or with type api an address")
    elif len(adapters) > 1:
        keys.refuse("reward_model_adapters", "only one adapter is loaded: merge the others into the model first")
    elif kind not in ("lora", "full", "api"):
        keys.refuse("reward_model_type", "wanted lora, full or api")
    elif kind == "api":
        source = {"type": "http", "url": str(path), "protocol": "llamafactory"}
    else:
        folder = adapters[0] if adapters else str(path)
        if adapters:
            _check_base(keys, "reward_model_adapters", folder, str(path))
        source = {"type": _reward_type(folder, kind), "path": folder}
        if source["type"] != "adapter" and keys.flag("trust_remote_code"):
            source["trust_remote_code"] = True
        if source["type"] != "adapter" and (bits := keys.take("reward_model_quantization_bit")) is not None:
            source["quantization"] = f"{bits}bit"
            keys.covered("reward_model_quantization_bit", by=f"rewards.0.quantization: {bits}bit")
    keys.ignore("the reward shares the policy's base, or is a service", "reward_model_quantization_bit")
    if kind in ("lora", "api"):
        keys.ignore("for reward_model_type full only, as in LLaMA-Factory", "reward_model_adapters")
    theirs = ("reward_model", "reward_model_type", "reward_model_adapters")
    if path is not None and kind in ("lora", "full", "api") and len(adapters) < 2:
        keys.put("rewards", [source], *theirs)


def _reward_type(folder: str, kind: str) -> str:
    """Their reward models keep the head in a file next to the model; what ``tether reward`` saved is read as well."""
    held = Path(folder)
    beside = any((held / name).is_file() for name in ("value_head.safetensors", "value_head.bin"))
    if beside or not held.is_dir():
        return "adapter" if beside and kind == "lora" else "value_head"
    return "adapter" if kind == "lora" else "model"


def _sampling(keys: Translator) -> None:
    """How answers are sampled."""
    longest = keys.number("max_new_tokens", 1024)
    if longest <= 0:
        keys.refuse("max_new_tokens", "wanted the maximum number of tokens in an answer")
    keys.ignore("max_new_tokens takes precedence", "max_length")
    keys.put("sampling.response_length", longest, "max_new_tokens")
    keys.allow_truncation(note="write top_p: 1.0 and top_k: 0 for an unbiased KL")
    why = "answers must be drawn from the policy's own distribution: remove this key"
    keys.off(why, do_sample=True, num_beams=1, repetition_penalty=1)


def _ppo_batches(keys: Translator) -> None:
    """Their batch consists of optimizer steps of ``gradient_accumulation_steps`` forwards; ours is split the same
    way."""
    rows, forwards = keys.number("per_device_train_batch_size", 8), keys.number("gradient_accumulation_steps", 1)
    steps, world = keys.number("ppo_buffer_size", 1), num_processes()
    product = " × ".join(str(n) for n in (rows, forwards, steps, *([world] if world > 1 else [])))
    theirs = ("per_device_train_batch_size", "gradient_accumulation_steps", "ppo_buffer_size")
    keys.put("train.rollout_batch_size", rows * forwards * steps * world, *theirs, note=product)
    keys.put("ppo.num_mini_batches", steps, "ppo_buffer_size")
    keys.put("train.micro_batch_size", rows, "per_device_train_batch_size")
    _run_length(keys)


def _ppo_logging(keys: Translator) -> None:
    """What a run logs, saves and evaluates along the way."""
    updates = keys.number("max_steps", -1)
    keys.put("train.logging_steps", keys.steps("logging_steps", 500, updates), "logging_steps")
    _saves(keys)
    _trackers(keys)
    _evaluations(keys, by="before the first update and after the last")
    keys.ignore("answers are decoded in batches of sampling.batch_size", "per_device_eval_batch_size")
    why = "the last policy is kept, as LLaMA-Factory does not evaluate in this stage: remove this key"
    keys.off(why, load_best_model_at_end=False, early_stopping_steps=())
    keys.ignore(_FOR_BEST, "metric_for_best_model", "greater_is_better")


def _run_length(keys: Translator) -> None:
    """Updates, or passes over the data."""
    if (steps := keys.number("max_steps", -1)) > 0:
        keys.put("train.max_steps", steps, "max_steps")
        keys.ignore("max_steps takes precedence", "num_train_epochs")
    else:
        keys.put("train.num_train_epochs", keys.take("num_train_epochs", 3.0), "num_train_epochs")
        keys.covered("max_steps", by="its default, as here")


_FOR_BEST = "for load_best_model_at_end and early_stopping_steps only"


def _best(keys: Translator, accuracy: str) -> None:
    """Which model is kept, and when a run ends early.

    Args:
        accuracy: our name of their ``eval_accuracy``.
    """
    keeps, patience = keys.flag("load_best_model_at_end"), keys.take("early_stopping_steps")
    if keeps or patience is not None:
        metric = f"eval_{str(keys.take('metric_for_best_model', 'loss')).removeprefix('eval_')}"
        ours = accuracy if metric == "eval_accuracy" else metric
        keys.put("train.metric_for_best_model", ours, "metric_for_best_model")
        if keys.gives("greater_is_better"):
            keys.put("train.greater_is_better", keys.flag("greater_is_better"), "greater_is_better")
    if keeps:
        keys.put("train.load_best_model_at_end", True, "load_best_model_at_end")
    if patience is not None:
        keys.put("train.early_stopping_patience", patience, "early_stopping_steps")
    keys.covered("load_best_model_at_end", by="the last model is kept, as here")
    keys.ignore(_FOR_BEST, "metric_for_best_model", "greater_is_better")


def _trackers(keys: Translator) -> None:
    """Experiment trackers and the name of the run there."""
    trackers = keys.take("report_to", "none")
    if keys.flag("use_swanlab"):
        trackers = [*(trackers if isinstance(trackers, list) else [trackers]), "swanlab"]
        trackers = [name for name in trackers if name != "none"]
    keys.put("train.report_to", trackers, "report_to", "use_swanlab")
    if (name := next((key for key in ("run_name", "swanlab_run_name") if keys.gives(key)), None)) is not None:
        keys.put_table([Key("train.run_name", name, form=NAME)])
    keys.ignore("run_name takes precedence", "swanlab_run_name")


def _evaluations(keys: Translator, *, by: str) -> None:
    """When to evaluate on the held-out data.

    Args:
        by: strategy if the file names none.
    """
    held_out = keys.gives("eval_dataset") or bool(keys.number("val_size", 0.0))
    strategy = keys.take("eval_strategy", "no")
    if held_out and strategy == "steps":
        every = "eval_steps" if keys.gives("eval_steps") else "logging_steps"
        steps = keys.steps(every, 500, keys.number("max_steps", -1))
        keys.put("train.eval_steps", steps, "eval_strategy", "eval_steps")
    elif held_out and strategy not in ("no", False):
        keys.refuse("eval_strategy", "wanted steps, with eval_steps, or no")
    keys.covered("eval_strategy", "eval_steps", "do_eval", by=by)


def _saves(keys: Translator) -> None:
    """Checkpoints."""
    strategy = keys.take("save_strategy", "steps")
    if strategy == "steps":
        steps = keys.steps("save_steps", 500, keys.number("max_steps", -1))
        keys.put("train.save_steps", steps, "save_steps")
        keys.covered("save_strategy", by="train.save_steps")
    elif strategy == "no":
        keys.covered("save_strategy", "save_steps", by="only the final model is saved")
    else:
        keys.refuse("save_strategy", "wanted steps, with save_steps, or no")


# The stages rm and sft


def _reward(keys: Translator) -> None:
    """A judge trained on pairs."""
    _datasets(keys, "pairs", "eval_pairs")
    if not keys.gives("eval_dataset") and not keys.take("val_size", 0.0):
        keys.put("data.eval_fraction", 0.0, "val_size")
    keys.off("only the answers are judged: remove this key", train_on_prompt=False, mask_history=False)
    _evaluations(keys, by="after the last step")
    _stage(keys, accuracy="eval_accuracy")


def _sft(keys: Translator) -> None:
    """A policy trained on demonstrations."""
    _datasets(keys, "demonstrations", "eval_demonstrations")
    keys.off("only answers are trained on here: remove this key", train_on_prompt=False)
    keys.put_table(SFT_KEYS)
    _evaluations(keys, by="after the last step")
    _stage(keys, accuracy="eval_mean_token_accuracy")


def _stage(keys: Translator, *, accuracy: str) -> None:
    """Common to both.

    Args:
        accuracy: as in ``_best``.
    """
    _chat(keys)
    keys.put("data.max_length", keys.take("cutoff_len", 2048), "cutoff_len", note="longer ones are dropped")
    rows, forwards = keys.number("per_device_train_batch_size", 8), keys.number("gradient_accumulation_steps", 1)
    theirs = ("per_device_train_batch_size", "gradient_accumulation_steps")
    keys.put("train.batch_size", rows * forwards * num_processes(), *theirs)
    keys.put("train.micro_batch_size", rows, "per_device_train_batch_size")
    _run_length(keys)
    why = "this stage uses AdamW with its usual settings: remove this key"
    keys.off(why, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, lr_scheduler_kwargs={})
    _optim(keys, ADAMW)
    keys.ignore("it saves time or memory only", "torch_compile")
    keys.off("rows are not packed here: remove this key", packing=False, neat_packing=False)
    keys.off("data is shuffled: remove this key", disable_shuffling=False)
    keys.off("rows are not sorted by length: remove this key", group_by_length=False)
    _best(keys, accuracy)
    _trackers(keys)
    keys.ignore("every step is logged", "logging_steps")
    keys.ignore("it saves time or memory only", "per_device_eval_batch_size")
    _saves(keys)
    keys.ignore(
        "for the stage ppo only",
        *("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "reward_model", "reward_model_type"),
        *("reward_model_adapters", "reward_model_quantization_bit"),
        *("ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards", "do_sample"),
        *("temperature", "top_p", "top_k", "num_beams", "max_length", "max_new_tokens", "repetition_penalty"),
    )
