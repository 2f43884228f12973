"""LLaMA-Factory's files of the stages ppo, sft and rm, as Tether runs them. Its keys are those of release 0.9.3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.compat.translation import Translation, Translator
from tether.config.launched import num_processes, uses_deepspeed, uses_fsdp
from tether.errors import ConfigError
from tether.report.plots import can_plot

SYSTEM = "LLaMA-Factory"
STAGES = {"ppo": "ppo", "sft": "sft", "rm": "reward"}
"""Our command of each stage."""

TEMPLATES = {
    name: name for name in ("alpaca", "chatml", "gemma", "llama2", "llama3", "mistral", "qwen", "vicuna")
} | {"gemma2": "gemma", "phi": "phi3", "empty": "none"}  # fmt: skip
"""Our name of a template; a model of another one brings its own with its tokenizer."""
ZEPHYR = "You are Zephyr, a helpful assistant."
"""The system prompt that their template zephyr has by itself."""
ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
ADAMW = {"adamw_torch": "adamw_torch", "adamw_hf": "adamw_torch", "adamw_torch_fused": "adamw_torch_fused"}
"""Our name of an optimizer of transformers."""
ADAMW_8BIT = dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit")
"""The same of those that the stage ppo has alone."""

IGNORED = {
    "data is read and tokenised anew, in this process": (
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size data_shared_file_system buffer_size "
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_drop_last remove_unused_columns label_names length_column_name ignore_data_skip media_dir "
        "accelerator_config"
    ),
    "it saves time or memory only": (
        "low_cpu_mem_usage offload_folder use_unsloth use_unsloth_gc enable_liger_kernel use_liger_kernel "
        "use_reentrant_gc gradient_checkpointing gradient_checkpointing_kwargs use_cache "
        "torch_compile_backend torch_compile_mode torchdynamo torch_empty_cache_steps auto_find_batch_size tf32 "
        "double_quantization quantization_device_map ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_find_unused_parameters average_tokens_across_devices jit_mode_eval use_ipex fp16_opt_level fp16_backend "
        "half_precision_backend bf16_full_eval fp16_full_eval fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap"
    ),
    "log-probabilities and losses are in float32 here": "upcast_layernorm upcast_lmhead_output",
    "for inference, export or another stage": (
        "infer_backend infer_dtype vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config "
        "sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend export_dir export_size "
        "export_device export_quantization_bit export_quantization_dataset export_quantization_nsamples "
        "export_quantization_maxlen export_legacy_format export_hub_model_id pref_beta pref_ftx pref_loss "
        "dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ld_alpha eval_num_beams "
        "length_penalty skip_special_tokens generation_max_length generation_num_beams generation_config "
        "compute_accuracy eval_on_each_dataset sortish_sampler"
    ),
    "logs and metrics are written to output_dir in any case": (
        "logging_dir logging_first_step logging_strategy logging_nan_inf_filter log_level log_level_replica "
        "log_on_each_node disable_tqdm print_param_status include_effective_tokens_per_second "
        "include_tokens_per_second include_num_input_tokens_seen skip_memory_metrics debug past_index "
        "prediction_loss_only eval_on_start include_for_metrics include_inputs_for_metrics batch_eval_metrics "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object use_legacy_prediction_loop "
        "mp_parameters tpu_num_cores tpu_metrics_debug badam_verbose swanlab_lark_webhook_url swanlab_lark_secret"
    ),
    "SwanLab's settings come from the environment: SWANLAB_PROJECT, SWANLAB_API_KEY": (
        "swanlab_project swanlab_workspace swanlab_mode swanlab_logdir swanlab_api_key"
    ),
    "the launcher says so: `accelerate launch -m tether`, `torchrun -m tether`": (
        "local_rank use_cpu no_cuda use_mps_device ray_scope ray_run_name ray_storage_path ray_storage_filesystem "
        "ray_num_workers resources_per_worker placement_strategy ray_init_kwargs"
    ),
    "weights are saved as safetensors, with all that a run needs to go on": (
        "save_safetensors save_only_model save_on_each_node restore_callback_states_from_checkpoint"
    ),
    "keys and caches come from the environment: HF_TOKEN, HF_HOME": (
        "hf_hub_token ms_hub_token om_hub_token hub_token push_to_hub_token cache_dir"
    ),
    "the order of the data follows seed, and no computation depends on chance beyond it": "data_seed full_determinism",
    "tokenizers are loaded as transformers has them": "use_fast_tokenizer",
    "it has no effect while its method is off": (
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise "
        "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
        "apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode "
        "badam_switch_interval badam_update_ratio badam_mask_mode pissa_iter pissa_convert loraplus_lr_embedding "
        "fsdp_config eval_delay hub_strategy hub_always_push"
    ),
    "padding never takes part in a loss here": "ignore_pad_token_for_loss",
}
"""Why keys that change nothing here change nothing."""

OFF: Mapping[str, Mapping[str, Any]] = {
    "its optimizer is not that of a Tether run, which is AdamW: leave it out": {
        "use_galore": False, "use_apollo": False, "use_badam": False, "use_adam_mini": False, "use_muon": False,
        "adafactor": False, "optim_args": (), "optim_target_modules": (), "loraplus_lr_ratio": (),
    },
    "images, video and sound are not read: leave it out for a text model": {
        key: () for key in (
            "image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches", "video_max_pixels",
            "video_min_pixels", "video_fps", "video_maxlen", "use_audio_in_video", "audio_sampling_rate",
        )
    } | {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False},
    "adapters are plain LoRA with PEFT's initialisation: leave it out": {
        "use_rslora": False, "use_dora": False, "pissa_init": False, "additional_target": (), "use_llama_pro": False,
    },
    "the model is trained as it is: change it before, and save it to a folder of its own": {
        "resize_vocab": False, "add_tokens": (), "add_special_tokens": (), "split_special_tokens": False,
        "rope_scaling": (), "shift_attn": False, "mixture_of_depths": (), "train_from_scratch": False,
        "moe_aux_loss_coef": (0, 0.0),
    },
    "it changes what is learned, and has no counterpart here: leave it out": {
        "neftune_noise_alpha": (), "label_smoothing_factor": 0, "early_stopping_steps": (), "tool_format": (),
    },
    "data is read whole, one dataset after the other, from its source: leave it out": {
        "streaming": False, "mix_strategy": "concat", "interleave_probs": (), "tokenized_path": (),
    },
    "train only: `tether evaluate` and `tether generate` do the rest": {
        "do_train": True, "do_predict": False, "predict_with_generate": False,
    },
    "give the whole folder of the adapter as adapter_name_or_path": {"adapter_folder": ()},
    "the names of the hub keys are hub_model_id and push_to_hub": {
        "push_to_hub_model_id": (), "push_to_hub_organization": (),
    },
    "it cannot be chosen here: leave it out": {
        "per_gpu_train_batch_size": (), "per_gpu_eval_batch_size": (),
    },
}  # fmt: skip
"""What to do about keys that would change the result, with the values that leave them without effect."""

TAKEN = (
    "stage model_name_or_path adapter_name_or_path create_new_adapter model_revision trust_remote_code flash_attn "
    "disable_gradient_checkpointing bf16 fp16 pure_bf16 finetuning_type lora_rank lora_alpha lora_dropout lora_target "
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules quantization_bit quantization_method "
    "quantization_type ref_model ref_model_adapters ref_model_quantization_bit reward_model reward_model_type "
    "reward_model_adapters reward_model_quantization_bit dataset eval_dataset dataset_dir template default_system "
    "enable_thinking cutoff_len max_samples val_size train_on_prompt mask_history packing neat_packing "
    "disable_shuffling group_by_length do_eval eval_strategy eval_steps per_device_eval_batch_size output_dir "
    "overwrite_output_dir logging_steps save_strategy save_steps save_total_limit plot_loss report_to run_name "
    "use_swanlab swanlab_run_name resume_from_checkpoint load_best_model_at_end metric_for_best_model "
    "greater_is_better push_to_hub hub_model_id hub_private_repo per_device_train_batch_size "
    "gradient_accumulation_steps learning_rate "
    "num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps weight_decay "
    "adam_beta1 adam_beta2 adam_epsilon optim max_grad_norm seed torch_compile ddp_timeout deepspeed fsdp "
    "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards do_sample temperature top_p top_k "
    "num_beams max_length max_new_tokens "
    "repetition_penalty"
)
"""Keys that become ours."""
NAMES = ("adapter_name_or_path", "reward_model_adapters", "lora_target", "dataset", "eval_dataset", "report_to")
"""Those of them that hold a name or several."""
GROUPS = ("lr_scheduler_kwargs", "deepspeed", "fsdp")
"""Those of them that hold groups of keys."""
KNOWN = frozenset(key for names in (TAKEN, *IGNORED.values()) for key in names.split()).union(*OFF.values())
"""Every key of LLaMA-Factory's training files."""


def recognised(data: Any) -> bool:
    """Whether the data of a file are LLaMA-Factory's: flat keys, ``stage`` or ``finetuning_type`` among them."""
    return isinstance(data, dict) and "model" not in data and bool({"stage", "finetuning_type"} & data.keys())


WITHOUT_SHARDING = (
    "processes share the rows of this stage (DDP) and no weights: leave it out, and train a model that is too large "
    "for one device with finetuning_type: lora"
)


def translated(source: str, given: Mapping[str, Any], origins: Mapping[str, str]) -> tuple[str, Translation]:
    """Our command for the file, and its configuration.

    Args:
        source: the file, for messages.
        given: its keys with their values, those of the command line among them.
        origins: where each key was set, for messages.

    Raises:
        ConfigError: keys that would change the result have no place here, or are none; names all of them.
    """
    stage = given.get("stage") or "sft"
    if not isinstance(stage, str) or stage not in STAGES:
        where = ", ".join(filter(None, (source, origins.get("stage"))))
        raise ConfigError(f"{where}: stage: got {stage}; Tether has the stages {', '.join(STAGES)}")
    keys = Translator(source, SYSTEM, given, origins)
    keys.single(*(key for key in TAKEN.split() if key not in (*NAMES, *GROUPS)))
    keys.single(*NAMES, names=True)
    keys.covered("stage", by=f"tether {STAGES[stage]}")
    for why, names in IGNORED.items():
        keys.ignore(why, *names.split())
    for why, usual in OFF.items():
        keys.off(why, **usual)
    _model(keys)
    _sharding(keys, stage)
    if keys.gives("ddp_timeout"):
        keys.put("train.ddp_timeout", keys.take("ddp_timeout"), "ddp_timeout")
    {"ppo": _ppo, "sft": _sft, "rm": _reward}[stage](keys)
    _output(keys)
    return STAGES[stage], keys.finish(KNOWN)


# What every stage has


def _model(keys: Translator) -> None:
    """The policy, or the model that becomes a judge."""
    path, adapters = keys.take("model_name_or_path"), _names(keys.take("adapter_name_or_path"))
    fresh = keys.flag("create_new_adapter")
    if path is None:
        keys.refuse("model_name_or_path", "missing; wanted a hub id or the folder of a model")
    elif len(adapters) > 1 or (adapters and fresh):
        keys.refuse(
            "adapter_name_or_path",
            "one adapter is continued here: merge the others into the model first, `tether merge ADAPTER -o DIR`, and "
            "name DIR as model_name_or_path",
        )
    elif adapters:
        keys.put("model.path", adapters[0], "adapter_name_or_path")
        keys.covered("model_name_or_path", "create_new_adapter", by="the adapter names its base")
        _check_base(keys, adapters[0], path)
    else:
        keys.put("model.path", path, "model_name_or_path")
        keys.covered("create_new_adapter", by="model.lora")
    if keys.take("lora_dropout", 0.0) and keys.take("stage") == "ppo":
        keys.note("Dropout is off while PPO runs, so that the ratio starts at 1; LLaMA-Factory's is on.")
    _method(keys, continues=bool(adapters))
    if keys.take("model_revision", "main") != "main":
        keys.put("model.revision", keys.take("model_revision"), "model_revision")
    keys.covered("model_revision", by="its default, as here")
    if keys.flag("trust_remote_code"):
        keys.put("model.trust_remote_code", True, "trust_remote_code")
    _attention(keys)
    keys.covered("trust_remote_code", "flash_attn", by="its default, as here")
    _precision(keys)


def _attention(keys: Translator) -> None:
    """The attention kernel; like them, the model's default where FlashAttention-2 cannot be used."""
    kernel = keys.take("flash_attn", "auto")
    if kernel not in ATTENTION:
        keys.refuse("flash_attn", f"wanted {', '.join(list(ATTENTION)[:-1])} or {list(ATTENTION)[-1]}")
    elif kernel == "fa2" and not _has_flash_attention():
        keys.covered("flash_attn", by="the model's default, as flash-attn is not installed or finds no GPU")
        keys.note(
            "FlashAttention-2 cannot be used here, so that attention is the model's default, as in LLaMA-Factory; "
            "where it can, set model.attn_implementation: flash_attention_2."
        )
    elif ATTENTION[kernel] is not None:
        keys.put("model.attn_implementation", ATTENTION[kernel], "flash_attn")


def _has_flash_attention() -> bool:
    """Whether LLaMA-Factory would use FlashAttention-2 on this machine."""
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


def _check_base(keys: Translator, adapter: str, base: str) -> None:
    """Refuses a local adapter that was trained on another base than the file names."""
    from tether.models.paths import adapter_base, is_same_model

    if Path(adapter, "adapter_config.json").is_file() and not is_same_model(adapter_base(adapter), base):
        keys.refuse(
            "adapter_name_or_path",
            f"its base is {adapter_base(adapter)}, not {base}: where both are the same model, correct "
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
    """The last layers alone are trained."""
    last, modules = keys.take("freeze_trainable_layers", 2), keys.take("freeze_trainable_modules", "all")
    if modules != "all" or keys.take("freeze_extra_modules") is not None or not isinstance(last, int) or last < 1:
        for key in ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"):
            if keys.gives(key):
                keys.refuse(key, "here whole layers are trained, the last ones: leave it out, or use LoRA")
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


def _precision(keys: Translator) -> None:
    """bf16, fp16, quantisation, and what is recomputed."""
    if keys.gives("fp16"):
        keys.put("train.fp16", keys.flag("fp16"), "fp16")
    if keys.flag("pure_bf16"):
        keys.put("model.dtype", "bfloat16", "pure_bf16")
    keys.covered("pure_bf16", by="its default, as here")
    if keys.gives("bf16"):
        keys.put("train.bf16", keys.flag("bf16"), "bf16")
    keys.put(
        "train.gradient_checkpointing",
        not keys.flag("disable_gradient_checkpointing"),
        "disable_gradient_checkpointing",
    )
    if (bits := keys.take("quantization_bit")) is not None and keys.take("stage") != "ppo":
        keys.refuse("quantization_bit", "a base in few bits is for the stage ppo only: leave it out")
    elif bits in (4, 8):
        keys.put("model.quantization", f"{bits}bit", "quantization_bit")
    elif bits is not None:
        keys.refuse("quantization_bit", "wanted 4 or 8")
    keys.off("models are quantised by bitsandbytes: leave it out", quantization_method=("bnb", "bitsandbytes"))
    keys.off("4 bits are of the type nf4: leave it out", quantization_type="nf4")


def _sharding(keys: Translator, stage: str) -> None:
    """DeepSpeed and FSDP, which the launcher says here, to PPO alone; on one device they change nothing."""
    for key, is_launched in {"deepspeed": uses_deepspeed(), "fsdp": uses_fsdp()}.items():
        given = keys.take(key)
        if given and is_launched:
            keys.covered(key, by="what the launcher says")
        elif given and num_processes() > 1:
            keys.refuse(key, _way_to_shard(key, given) if stage == "ppo" else WITHOUT_SHARDING)
        keys.ignore("on one device there is nothing to shard", key)


def _way_to_shard(key: str, given: Any) -> str:
    file = given if key == "deepspeed" and isinstance(given, str) else "FILE.json"
    said = f"--use_deepspeed --deepspeed_config_file {file}" if key == "deepspeed" else (
        "--config_file examples/accelerate/fsdp2.yaml"
    )
    return (
        f"the launcher says it: leave it out and start {num_processes()} processes by accelerate launch {said} "
        f"--num_processes {num_processes()} -m tether ppo …"
    )


def _output(keys: Translator) -> None:
    """Where things go."""
    if keys.take("output_dir") is None:
        keys.refuse("output_dir", "missing; wanted a folder")
    else:
        keys.put("output_dir", keys.take("output_dir"), "output_dir")
    if keys.flag("overwrite_output_dir"):
        keys.put("overwrite_output_dir", True, "overwrite_output_dir")
    keys.covered("overwrite_output_dir", by="its default, as here")
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
            keys.ignore("report.html has every curve; PNG files need matplotlib, pip install tether[plot]", "plot_loss")
        else:
            keys.plots = True
            keys.covered("plot_loss", by="the curves as PNG files in output_dir")
    keys.covered("plot_loss", by="its default, as here")


def _chat(keys: Translator) -> None:
    """The template, its system prompt and its arguments."""
    template = keys.take("template")
    if template in TEMPLATES:
        keys.put("data.chat_template", TEMPLATES[template], "template")
    elif template is not None:
        _own_template(keys, template)
    if keys.gives("default_system"):
        keys.put("data.system_prompt", keys.take("default_system"), "default_system")
    elif template == "zephyr":
        keys.put("data.system_prompt", ZEPHYR, "template", note="theirs of this template")
    if not keys.flag("enable_thinking", True):
        keys.put("data.chat_template_kwargs", {"enable_thinking": False}, "enable_thinking")
    keys.covered("enable_thinking", by="its default, as here")


def _own_template(keys: Translator, template: str) -> None:
    """A template that we have no name for: the model's own stands in, if it has one."""
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
        if template == "zephyr":
            keys.note("The template is the model's own: LLaMA-Factory's zephyr has no newline after the end token.")
    else:
        keys.refuse("template", f"wanted one of {', '.join(TEMPLATES)}, as the model's tokenizer has no chat template")


def _datasets(keys: Translator, ours: str, held_out: str) -> None:
    """The datasets by their names in dataset_info.json, or by their hub ids.

    Args:
        ours: our key of what is trained on, without ``data.``.
        held_out: that of what is held out.
    """
    folder = str(keys.take("dataset_dir", "data"))
    if not keys.gives("dataset"):
        keys.refuse("dataset", "missing; wanted names of datasets in dataset_info.json")
    else:
        keys.put(f"data.{ours}", _names(keys.take("dataset")), "dataset")
    if folder == "ONLINE":
        keys.covered("dataset_dir", by="hub ids")
    elif folder.startswith("REMOTE:"):
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
    if keys.gives("max_samples"):
        keys.put("data.max_samples", keys.take("max_samples"), "max_samples")


def _names(value: Any) -> list[str]:
    """The parts of a list that is written with commas."""
    parts = value if isinstance(value, list) else str(value or "").split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _schedule(keys: Translator) -> None:
    """Optimizer and learning rate."""
    keys.put("train.learning_rate", keys.take("learning_rate", 5e-5), "learning_rate")
    keys.put("train.lr_scheduler_type", keys.take("lr_scheduler_type", "linear"), "lr_scheduler_type")
    warmup, steps = keys.number("warmup_ratio", 0.0), keys.number("warmup_steps", 0)
    updates = keys.number("max_steps", -1)
    if steps >= 1 and updates <= 0:
        keys.refuse("warmup_steps", "without max_steps it cannot be told which share that is: write warmup_ratio")
    elif steps >= 1:
        keys.put("train.warmup_ratio", min(1.0, steps / updates), "warmup_steps", "max_steps")
    elif steps or warmup:
        keys.put("train.warmup_ratio", steps or warmup, "warmup_steps" if steps else "warmup_ratio")
    keys.covered("warmup_steps", "warmup_ratio", by="train.warmup_ratio")
    keys.put("train.weight_decay", keys.take("weight_decay", 0.0), "weight_decay")
    keys.put("train.max_grad_norm", keys.take("max_grad_norm", 1.0) or None, "max_grad_norm")
    keys.put("train.seed", keys.take("seed", 42), "seed")


def _optim(keys: Translator, names: Mapping[str, str]) -> None:
    """The optimizer, where it is AdamW."""
    optim = keys.take("optim")
    if optim not in (None, *names):
        keys.refuse("optim", f"wanted one of {', '.join(names)}, or leave it out")
    elif optim is not None and names is not ADAMW:
        keys.put("train.optim", names[optim], "optim")
    keys.covered("optim", by="AdamW, as here")


# The stage ppo


def _ppo(keys: Translator) -> None:
    """What their trainer does beside what the file says is that of TRL 0.9.6, on which it stands."""
    _reference(keys)
    _reward_source(keys)
    keys.put("value.kind", "head", note="a head on the policy, as theirs")
    _datasets(keys, "prompts", "eval_prompts")
    _chat(keys)
    keys.put("data.max_prompt_length", keys.take("cutoff_len", 2048), "cutoff_len", note="longer ones are dropped")
    _sampling(keys)
    keys.put("ppo.kl_coef", 0.2)
    keys.put("ppo.kl_target", keys.take("ppo_target", 6.0), "ppo_target")
    keys.put("ppo.num_ppo_epochs", keys.take("ppo_epochs", 4), "ppo_epochs")
    keys.put("ppo.max_ratio", 10.0, note="where their update skips")
    if keys.flag("ppo_score_norm"):
        keys.put("ppo.score_norm", "running", "ppo_score_norm")
    if keys.flag("ppo_whiten_rewards"):
        keys.put("ppo.whiten_rewards", True, "ppo_whiten_rewards")
    keys.covered("ppo_score_norm", "ppo_whiten_rewards", by="its default, as here")
    _ppo_batches(keys)
    _schedule(keys)
    for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("adam_epsilon", 1e-8)):
        keys.put(f"train.{name}", keys.take(name, default), name)
    _optim(keys, ADAMW | ADAMW_8BIT)
    if keys.flag("torch_compile"):
        keys.put("train.compile", True, "torch_compile")
    keys.covered("torch_compile", by="its default, as here")
    if keys.gives("lr_scheduler_kwargs"):
        keys.put("train.lr_scheduler_kwargs", keys.take("lr_scheduler_kwargs"), "lr_scheduler_kwargs")
    _ppo_logging(keys)
    keys.ignore("for sft and rm only", "train_on_prompt", "mask_history", "packing", "neat_packing")
    keys.ignore("prompts are shuffled, and padding costs nothing here", "disable_shuffling", "group_by_length")
    keys.note("Log-probabilities are at the temperature of sampling; LLaMA-Factory's are at temperature 1.")


def _reference(keys: Translator) -> None:
    """Theirs is the base with adapters off; ours is what the run starts from, and the KL starts at 0."""
    start = [keys.take("model_name_or_path"), keys.take("adapter_name_or_path")]
    if keys.gives("ref_model") and [keys.take("ref_model"), keys.take("ref_model_adapters")] != start:
        for key in ("ref_model", "ref_model_adapters"):
            if keys.gives(key):
                keys.refuse(key, "the reference is the policy that the run starts from: leave it out")
    keys.covered("ref_model", "ref_model_adapters", by="the policy that the run starts from")
    keys.ignore("the reference shares the policy's base", "ref_model_quantization_bit")
    if keys.gives("adapter_name_or_path") and not keys.gives("ref_model"):
        keys.note("The reference is the adapter that the run starts from; LLaMA-Factory's is the base without it.")


def _reward_source(keys: Translator) -> None:
    """The one reward model, of the three kinds that they have."""
    kind, path = keys.take("reward_model_type", "lora"), keys.take("reward_model")
    adapters = _names(keys.take("reward_model_adapters"))
    if path is None:
        keys.refuse("reward_model", "missing; wanted the folder of a reward model, or with type api an address")
    elif len(adapters) > 1:
        keys.refuse("reward_model_adapters", "one adapter is loaded here: merge the others into the model first")
    elif kind not in ("lora", "full", "api"):
        keys.refuse("reward_model_type", "wanted lora, full or api")
    elif kind == "api":
        source = {"type": "http", "url": str(path), "protocol": "llamafactory"}
    else:
        folder = adapters[0] if adapters else str(path)
        source = {"type": _reward_type(folder, kind), "path": folder}
        if source["type"] != "adapter" and keys.flag("trust_remote_code"):
            source["trust_remote_code"] = True
        if source["type"] != "adapter" and (bits := keys.take("reward_model_quantization_bit")) is not None:
            source["quantization"] = f"{bits}bit"
            keys.covered("reward_model_quantization_bit", by=f"rewards.0.quantization: {bits}bit")
    keys.ignore("the reward shares the policy's base, or is a service", "reward_model_quantization_bit")
    theirs = ("reward_model", "reward_model_type", "reward_model_adapters")
    if path is not None and kind in ("lora", "full", "api") and len(adapters) < 2:
        keys.put("rewards", [source], *theirs)


def _reward_type(folder: str, kind: str) -> str:
    """Theirs keep the head in a file beside the model; what ``tether reward`` saved is read as well."""
    held = Path(folder)
    beside = any((held / name).is_file() for name in ("value_head.safetensors", "value_head.bin"))
    if beside or not held.is_dir():
        return "adapter" if beside and kind == "lora" else "value_head"
    return "adapter" if kind == "lora" else "model"


def _sampling(keys: Translator) -> None:
    """How answers are drawn."""
    longest = keys.number("max_new_tokens", 1024)
    if longest <= 0:
        keys.refuse("max_new_tokens", "wanted the most tokens of an answer")
    keys.ignore("max_new_tokens is what counts", "max_length")
    keys.put("sampling.response_length", longest, "max_new_tokens")
    keys.put("sampling.temperature", keys.take("temperature", 0.95), "temperature")
    top_p, top_k = keys.number("top_p", 0.7), keys.number("top_k", 50)
    if top_p < 1:
        keys.put("sampling.top_p", top_p, "top_p")
    if top_k > 0:
        keys.put("sampling.top_k", top_k, "top_k")
    keys.covered("top_p", "top_k", by="every token can be drawn, as by default here")
    if top_p < 1 or top_k > 0:
        keys.put("sampling.allow_truncated_sampling", True, note="write top_p: 1.0 and top_k: 0 for an unbiased KL")
    why = "answers must be drawn from the policy's own distribution: leave it out"
    keys.off(why, do_sample=True, num_beams=1, repetition_penalty=1)


def _ppo_batches(keys: Translator) -> None:
    """Their batch is made of optimizer steps of ``gradient_accumulation_steps`` forwards; ours is cut the same way."""
    rows, forwards = keys.number("per_device_train_batch_size", 8), keys.number("gradient_accumulation_steps", 1)
    steps, world = keys.number("ppo_buffer_size", 1), num_processes()
    product = " × ".join(str(n) for n in (rows, forwards, steps, *([world] if world > 1 else [])))
    theirs = ("per_device_train_batch_size", "gradient_accumulation_steps", "ppo_buffer_size")
    keys.put("train.rollout_batch_size", rows * forwards * steps * world, *theirs, note=product)
    keys.put("ppo.num_mini_batches", steps, "ppo_buffer_size")
    keys.put("train.micro_batch_size", rows, "per_device_train_batch_size")
    if (updates := keys.number("max_steps", -1)) > 0:
        keys.put("train.max_steps", updates, "max_steps")
        keys.ignore("max_steps is what counts", "num_train_epochs")
    else:
        keys.put("train.num_train_epochs", keys.take("num_train_epochs", 3.0), "num_train_epochs")
        keys.covered("max_steps", by="its default, as here")


def _ppo_logging(keys: Translator) -> None:
    """What a run tells, saves and measures on the way."""
    updates = keys.number("max_steps", -1)
    keys.put("train.logging_steps", keys.steps("logging_steps", 500, updates), "logging_steps")
    _saves(keys)
    _trackers(keys)
    if keys.take("resume_from_checkpoint"):
        keys.put("resume", keys.take("resume_from_checkpoint"), "resume_from_checkpoint")
    keys.covered("resume_from_checkpoint", by="its default, as here")
    _evaluations(keys, by="before the first update and after the last")
    keys.ignore("answers are decoded in batches of sampling.batch_size", "per_device_eval_batch_size")
    keys.off("the last policy is kept: leave it out", load_best_model_at_end=False)
    keys.ignore("for load_best_model_at_end only", "metric_for_best_model", "greater_is_better")


def _trackers(keys: Translator) -> None:
    """Experiment trackers and the name of the run there."""
    trackers = keys.take("report_to", "none")
    if keys.flag("use_swanlab"):
        trackers = [*(trackers if isinstance(trackers, list) else [trackers]), "swanlab"]
        trackers = [name for name in trackers if name != "none"]
    keys.put("train.report_to", trackers, "report_to", "use_swanlab")
    if (name := next((key for key in ("run_name", "swanlab_run_name") if keys.gives(key)), None)) is not None:
        keys.put("train.run_name", keys.take(name), name)
    keys.ignore("run_name is what counts", "swanlab_run_name")


def _evaluations(keys: Translator, *, by: str) -> None:
    """When what is held out is evaluated on.

    Args:
        by: when it is where the file does not say.
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
        keys.covered("save_strategy", "save_steps", by="the final model alone is saved")
    else:
        keys.refuse("save_strategy", "wanted steps, with save_steps, or no")
    keys.put("train.save_total_limit", keys.take("save_total_limit"), "save_total_limit")


# The stages rm and sft


def _reward(keys: Translator) -> None:
    """A judge from pairs."""
    _datasets(keys, "pairs", "eval_pairs")
    if not keys.gives("eval_dataset") and not keys.take("val_size", 0.0):
        keys.put("data.eval_fraction", 0.0, "val_size")
    keys.off("its answers alone are judged: leave it out", train_on_prompt=False, mask_history=False)
    _evaluations(keys, by="after the last step")
    _stage(keys)


def _sft(keys: Translator) -> None:
    """A policy from demonstrations."""
    _datasets(keys, "demonstrations", "eval_demonstrations")
    keys.off("answers alone are trained on here: leave it out", train_on_prompt=False)
    if keys.flag("mask_history"):
        keys.put("data.turns", "last", "mask_history")
    keys.covered("mask_history", by="its default, as here")
    _evaluations(keys, by="after the last step")
    _stage(keys)


def _stage(keys: Translator) -> None:
    """What both have."""
    _chat(keys)
    keys.put("data.max_length", keys.take("cutoff_len", 2048), "cutoff_len", note="longer ones are dropped")
    rows, forwards = keys.number("per_device_train_batch_size", 8), keys.number("gradient_accumulation_steps", 1)
    theirs = ("per_device_train_batch_size", "gradient_accumulation_steps")
    keys.put("train.batch_size", rows * forwards * num_processes(), *theirs)
    keys.put("train.micro_batch_size", rows, "per_device_train_batch_size")
    if (steps := keys.number("max_steps", -1)) > 0:
        keys.put("train.max_steps", steps, "max_steps")
        keys.ignore("max_steps is what counts", "num_train_epochs")
    else:
        keys.put("train.num_train_epochs", keys.take("num_train_epochs", 3.0), "num_train_epochs")
        keys.covered("max_steps", by="its default, as here")
    _schedule(keys)
    why = "AdamW has these settings in this stage: leave it out"
    keys.off(why, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, lr_scheduler_kwargs={})
    _optim(keys, ADAMW)
    keys.ignore("it saves time or memory only", "torch_compile")
    keys.off("rows are not packed here: leave it out", packing=False, neat_packing=False)
    keys.off("data is shuffled: leave it out", disable_shuffling=False)
    keys.off("rows are not sorted by length: leave it out", group_by_length=False)
    keys.off("the last model is kept: leave it out", load_best_model_at_end=False)
    keys.ignore("for load_best_model_at_end only", "metric_for_best_model", "greater_is_better")
    _trackers(keys)
    keys.ignore("every step is logged", "logging_steps")
    keys.ignore("it saves time or memory only", "per_device_eval_batch_size")
    _saves(keys)
    if keys.take("resume_from_checkpoint"):
        keys.put("resume", keys.take("resume_from_checkpoint"), "resume_from_checkpoint")
    keys.covered("resume_from_checkpoint", by="its default, as here")
    keys.ignore(
        "for the stage ppo only",
        *("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "reward_model", "reward_model_type"),
        *("reward_model_adapters", "reward_model_quantization_bit"),
        *("ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards", "do_sample"),
        *("temperature", "top_p", "top_k", "num_beams", "max_length", "max_new_tokens", "repetition_penalty"),
    )
