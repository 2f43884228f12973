"""The keys of LLaMA-Factory's training files, those of releases 0.9.3 and 0.9.4, and the names of its templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tether.compat.table import FLAG, NULLABLE, SWITCH, TOP_K, TOP_P, Key, constant

TEMPLATES = {
    name: name for name in ("chatml", "gemma", "llama3", "mistral", "qwen")
} | {"gemma2": "gemma", "phi": "phi3"} | {
    name: f"llamafactory/{name}" for name in ("alpaca", "default", "empty", "fewshot", "llama2", "vicuna", "zephyr")
}  # fmt: skip
"""Our name of a template; models with other templates have their own in their tokenizer."""
OTHER_TEMPLATES = (
    "aquila atom baichuan baichuan2 bailing bailing_v2 belle bluelm breeze chatglm2 chatglm3 chatml_de codegeex2 "
    "codegeex4 cohere cpm cpm3 cpm4 dbrx deepseek deepseek3 deepseekcoder deepseekr1 dots_ocr ernie ernie_nothink "
    "ernie_vl exaone falcon falcon_h1 gemma3 gemma3n glm4 glm4_5v glm4_moe glm4v glmz1 gpt_oss granite3 "
    "granite3_vision granite4 hunyuan index intern intern2 intern_s1 intern_vl keye_vl kimi_vl llama2_zh llama4 llava "
    "llava_next llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_video llava_next_video_mistral "
    "llava_next_video_yi llava_next_yi marco mimo mimo_v2 mimo_vl minicpm_o minicpm_v minicpm_v_4_6 minimax1 minimax2 "
    "ministral ministral3 mistral_small mllama moonlight olmo openchat openchat-3.6 opencoder orion paligemma "
    "paligemma_chat phi4 phi_small pixtral qwen2_audio qwen2_omni qwen2_vl qwen3 qwen3_5 qwen3_5_nothink "
    "qwen3_nothink qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink sailor seed_coder seed_oss skywork_o1 "
    "smollm smollm2 solar starchat telechat telechat2 video_llava xuanyuan xverse yayi yi yi_vl yuan ziya"
)
"""The remaining names of theirs, including those of later releases."""
ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
FORMER_ATTENTION = {False: "auto", True: "fa2"}
"""What a truth value, as in earlier releases, stands for."""

IGNORED = {
    "data is read and tokenized anew, in this process": (
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
        "half_precision_backend bf16_full_eval fp16_full_eval fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap "
        "use_v1_kernels liger_kernel_config"
    ),
    "log-probabilities and losses are in float32 here": "upcast_layernorm upcast_lmhead_output",
    "for inference, export or another stage": (
        "infer_backend infer_dtype vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config "
        "sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend export_dir export_size "
        "export_device export_quantization_bit export_quantization_dataset export_quantization_nsamples "
        "export_quantization_maxlen export_legacy_format export_hub_model_id pref_beta pref_ftx pref_loss "
        "dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ld_alpha eval_num_beams "
        "length_penalty skip_special_tokens generation_max_length generation_num_beams generation_config "
        "compute_accuracy eval_on_each_dataset sortish_sampler use_kv_cache pref_bco_weight cpu_infer chunk_size mode "
        "kt_optimize_rule kt_maxlen kt_use_cuda_graph kt_mode kt_force_think"
    ),
    "logs and metrics are written to output_dir in any case": (
        "logging_dir logging_first_step logging_strategy logging_nan_inf_filter log_level log_level_replica "
        "log_on_each_node disable_tqdm print_param_status include_effective_tokens_per_second "
        "include_tokens_per_second include_num_input_tokens_seen skip_memory_metrics debug past_index "
        "prediction_loss_only eval_on_start include_for_metrics include_inputs_for_metrics batch_eval_metrics "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object use_legacy_prediction_loop "
        "mp_parameters tpu_num_cores tpu_metrics_debug badam_verbose swanlab_lark_webhook_url swanlab_lark_secret"
    ),
    "a tracker's project comes from the environment": "project trackio_space_id",
    "SwanLab's settings come from the environment: SWANLAB_PROJECT, SWANLAB_API_KEY": (
        "swanlab_project swanlab_workspace swanlab_mode swanlab_logdir swanlab_api_key"
    ),
    "the launcher sets it: `accelerate launch -m tether`, `torchrun -m tether`": (
        "local_rank use_cpu no_cuda use_mps_device ray_scope ray_run_name ray_storage_path ray_storage_filesystem "
        "ray_num_workers resources_per_worker placement_strategy ray_init_kwargs"
    ),
    "weights are saved as safetensors, with all that a run needs to resume": (
        "save_safetensors save_only_model save_on_each_node restore_callback_states_from_checkpoint"
    ),
    "keys and caches come from the environment: HF_TOKEN, HF_HOME": (
        "hf_hub_token ms_hub_token om_hub_token hub_token push_to_hub_token cache_dir"
    ),
    "seed determines the order of the data, and all else that is random": "data_seed full_determinism",
    "tokenizers are loaded as transformers provides them": "use_fast_tokenizer",
    "it has no effect while its method is off": (
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise "
        "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
        "apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode "
        "badam_switch_interval badam_update_ratio badam_mask_mode pissa_iter pissa_convert loraplus_lr_embedding "
        "fsdp_config eval_delay hub_strategy hub_always_push hub_revision fp8_backend module_dropout oft_rank "
        "oft_block_size oft_target init_special_tokens asft_alpha eaft_alpha"
    ),
    "padding never takes part in a loss here": "ignore_pad_token_for_loss",
}
"""Keys that have no effect here, with the reason."""

OFF: Mapping[str, Mapping[str, Any]] = {
    "the optimizer of a Tether run is AdamW: remove this key": {
        "use_galore": False, "use_apollo": False, "use_badam": False, "use_adam_mini": False, "use_muon": False,
        "adafactor": False, "optim_args": (), "optim_target_modules": (), "loraplus_lr_ratio": (),
    },
    "images, video and sound are not read: remove it for a text model": {
        key: () for key in (
            "image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches", "video_max_pixels",
            "video_min_pixels", "video_fps", "video_maxlen", "use_audio_in_video", "audio_sampling_rate",
        )
    } | {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False},
    "adapters are plain LoRA with PEFT's initialization: remove this key": {
        "use_rslora": False, "use_dora": False, "pissa_init": False, "additional_target": (), "use_llama_pro": False,
    },
    "the model is trained unchanged: change it beforehand, save it to a folder, and remove this key": {
        "resize_vocab": False, "add_tokens": (), "add_special_tokens": (), "split_special_tokens": False,
        "new_special_tokens_config": (),
        "rope_scaling": (), "shift_attn": False, "mixture_of_depths": (), "train_from_scratch": False,
        "moe_aux_loss_coef": (0, 0.0),
    },
    "it changes what is learned, and has no counterpart here: remove this key": {
        "neftune_noise_alpha": 0, "label_smoothing_factor": 0, "tool_format": (), "use_dft_loss": False,
        "use_asft_loss": False, "use_eaft_loss": False,
    },
    "the model is trained by transformers, in float32 or half precision: remove this key": {
        "use_kt": False, "use_mca": False, "fp8": False, "fp8_enable_fsdp_float8_all_gather": False,
        "parallelism_config": (),
    },
    "datasets are read completely, one after another, from their source: remove this key": {
        "streaming": False, "mix_strategy": "concat", "interleave_probs": (), "tokenized_path": (),
    },
    "train only: `tether evaluate` and `tether generate` do the rest": {
        "do_train": True, "do_predict": False, "predict_with_generate": False,
    },
    "give the whole folder of the adapter as adapter_name_or_path": {"adapter_folder": ()},
    "the names of the hub keys are hub_model_id and push_to_hub": {
        "push_to_hub_model_id": (), "push_to_hub_organization": (),
    },
    "it cannot be chosen here: remove this key": {
        "per_gpu_train_batch_size": (), "per_gpu_eval_batch_size": (),
    },
}  # fmt: skip
"""What to do instead of using keys that would change the result, with the values that have no effect."""

KEYS = (
    Key("model.revision", "model_revision"),
    Key("model.trust_remote_code", "trust_remote_code", form=FLAG),
    Key("model.dtype", "pure_bf16", form=constant("bfloat16")),
    Key("train.bf16", "bf16", form=SWITCH),
    Key("train.fp16", "fp16", form=SWITCH),
    Key("train.ddp_timeout", "ddp_timeout"),
    Key("train.learning_rate", "learning_rate", 5e-5),
    Key("train.lr_scheduler_type", "lr_scheduler_type", "linear"),
    Key("train.weight_decay", "weight_decay", 0.0),
    Key("train.seed", "seed", 42),
    Key("train.gradient_checkpointing", "disable_gradient_checkpointing", form=constant(True, when=False)),
    Key("train.save_total_limit", "save_total_limit", form=NULLABLE),
    Key("data.system_prompt", "default_system"),
    Key("data.chat_template_kwargs", "enable_thinking", True, constant({"enable_thinking": False}, when=False)),
    Key("data.max_samples", "max_samples"),
    Key("output_dir", "output_dir"),
    Key("resume", "resume_from_checkpoint"),
    Key("overwrite_output_dir", "overwrite_output_dir", form=FLAG),
)
"""Keys of all stages that stand for one of ours."""
PPO_KEYS = (
    Key("ppo.kl_target", "ppo_target", 6.0),
    Key("ppo.num_ppo_epochs", "ppo_epochs", 4),
    Key("ppo.score_norm", "ppo_score_norm", form=constant("running")),
    Key("ppo.whiten_rewards", "ppo_whiten_rewards", form=FLAG),
    Key("sampling.temperature", "temperature", 0.95),
    Key("sampling.top_p", "top_p", 0.7, TOP_P),
    Key("sampling.top_k", "top_k", 50, TOP_K),
    Key("train.adam_beta1", "adam_beta1", 0.9),
    Key("train.adam_beta2", "adam_beta2", 0.999),
    Key("train.adam_epsilon", "adam_epsilon", 1e-8),
    Key("train.lr_scheduler_kwargs", "lr_scheduler_kwargs"),
    Key("train.compile", "torch_compile", form=FLAG),
)
"""Further ones of the stage ppo."""
SFT_KEYS = (Key("data.turns", "mask_history", form=constant("last")),)
"""Those of the stage sft."""
TAKEN = " ".join(key.theirs for key in KEYS + PPO_KEYS + SFT_KEYS) + (
    " stage model_name_or_path adapter_name_or_path create_new_adapter flash_attn finetuning_type lora_rank "
    "lora_alpha lora_dropout lora_target freeze_trainable_layers freeze_trainable_modules freeze_extra_modules "
    "quantization_bit quantization_method quantization_type ref_model ref_model_adapters ref_model_quantization_bit "
    "reward_model reward_model_type reward_model_adapters reward_model_quantization_bit dataset eval_dataset "
    "dataset_dir template cutoff_len val_size train_on_prompt packing neat_packing disable_shuffling group_by_length "
    "do_eval eval_strategy eval_steps per_device_eval_batch_size logging_steps save_strategy save_steps plot_loss "
    "report_to run_name use_swanlab swanlab_run_name load_best_model_at_end metric_for_best_model greater_is_better "
    "early_stopping_steps push_to_hub hub_model_id hub_private_repo per_device_train_batch_size "
    "gradient_accumulation_steps num_train_epochs max_steps warmup_ratio warmup_steps optim max_grad_norm deepspeed "
    "fsdp ppo_buffer_size do_sample num_beams max_length max_new_tokens repetition_penalty"
)
"""Keys that are translated to ours."""
NAMES = ("adapter_name_or_path", "reward_model_adapters", "lora_target", "dataset", "eval_dataset", "report_to")
"""Those of them that hold one or several names."""
GROUPS = ("lr_scheduler_kwargs", "deepspeed", "fsdp")
"""Those of them that hold groups of keys."""
FORMER = {
    "evaluation_strategy": "eval_strategy",
    "checkpoint_dir": "adapter_name_or_path",
    "neft_alpha": "neftune_noise_alpha",
    "num_layer_trainable": "freeze_trainable_layers",
    "name_module_trainable": "freeze_trainable_modules",
    "ppo_logger": "report_to",
}
"""Their names in earlier releases, where they had the same meaning."""
INVERTED = {"resume_lora_training": "create_new_adapter"}
"""Their names in earlier releases, where they had the opposite meaning."""
GONE = {
    "max_source_length": "it is called cutoff_len now, and counts prompt and answer",
    "max_target_length": "it is called cutoff_len now, and counts prompt and answer",
    "prompt_template": "it is called template now",
    "source_prefix": "write it in the prompts",
}
"""Keys of earlier releases that have become others, with what to write instead."""
KNOWN = frozenset(key for names in (TAKEN, *IGNORED.values()) for key in names.split()).union(*OFF.values())
"""Every key of LLaMA-Factory's training files."""
