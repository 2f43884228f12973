"""What other systems call our keys. Used only in the message about an unknown key: no such name is accepted.

A name is looked up with its whole path first (``critic.optim.lr``), then by its last part (``init_kl_coef``).
"""

from __future__ import annotations

from typing import NamedTuple


class Alias(NamedTuple):
    """Where a concept lives here."""

    keys: tuple[str, ...]
    """Our keys, as the command line writes them (``N`` for a list position); empty where we have none."""
    note: str = ""
    """What else the user must know."""


def _table(*rows: tuple[str, Alias]) -> dict[str, Alias]:
    return {name: alias for names, alias in rows for name in names.split()}


def _to(*keys: str, note: str = "") -> Alias:
    return Alias(keys, note)


def _absent(note: str) -> Alias:
    return Alias((), note)


ALIASES = _table(
    # models
    ("model_name_or_path model_name sft_model_path pretrain actor.model_name_or_path actor_rollout_ref.model.path",
     _to("model.path")),
    ("adapter_name_or_path model_adapter_name", _to("model.path", note="the folder of a PEFT adapter goes there too")),
    ("model_revision", _to("model.revision")),
    ("torch_dtype model_dtype param_dtype pure_bf16", _to("model.dtype")),
    ("flash_attn attn_impl use_flash_attention_2", _to("model.attn_implementation")),
    ("use_peft use_lora finetuning_type peft_config", _to("model.lora", note="`lora: {}` turns LoRA on")),
    ("num_layers_unfrozen freeze_trainable_layers",
     _to("model.freeze_layers", note="it counts the frozen layers, from the first")),
    ("lora_r lora_rank ds.lora.rank", _to("model.lora.r")),
    ("lora_alpha ds.lora.alpha", _to("model.lora.alpha")),
    ("lora_dropout ds.lora.dropout", _to("model.lora.dropout")),
    ("lora_target lora_target_modules", _to("model.lora.target_modules")),
    ("ref_model ref_model_name_or_path ref_model_adapters ref_adapter_name ref.model_name_or_path",
     _absent("the reference is always the policy that the run starts from")),
    ("load_in_4bit load_in_8bit quantization_bit", _to("model.quantization", note="4bit or 8bit, with `lora: {}`")),
    ("ref_model_quantization_bit", _absent("the reference shares the policy's base; see model.quantization")),
    ("reward_model_quantization_bit", _to("rewards.N.quantization", note="4bit or 8bit")),
    ("critic_pretrain critic.model_name_or_path critic.model.path value_model value_model_path", _to("value.init")),
    ("critic_learning_rate lr_critic critic.adam.lr critic.optim.lr", _to("value.learning_rate")),
    ("freezing_steps freezing_actor_steps critic_warmup critic_warmup_steps policy_training_start_step",
     _to("value.warmup_steps", note="updates in which only the critic trains")),
    ("save_value_network", _to("value.save")),
    # rewards
    ("reward_model_path reward_model reward_pretrain reward.model_name_or_path reward.reward_model.model_path",
     _to("rewards", note="a list: `- {type: model, path: …}`, type value_head for LLaMA-Factory's reward models")),
    ("reward_model_adapters",
     _to("rewards", note="a list: `- {type: value_head, path: …}`, type adapter for one with a classifier's head")),
    ("reward_model_type", _to("rewards.N.type")),
    ("reward_funcs compute_score custom_reward_function reward.custom_reward_function.path",
     _to("rewards", note="a list: `- {type: function, path: FILE.py, name: FUNCTION}`")),
    ("remote_rm_url reward.remote_url rm_url",
     _to("rewards", note="a list: `- {type: http, url: …}`; docs/rewards.md describes the protocol")),
    ("reward_weights reward_weight", _to("rewards.N.weight")),
    ("ppo_score_norm use_score_scaling use_score_norm normalize_reward normalize_enable scale_reward reward_baseline",
     _to("ppo.score_norm", note="`running` is LLaMA-Factory's")),
    ("score_clip cliprange_reward clip_range_reward reward.clip_range", _to("ppo.reward_clip")),
    ("overlong_buffer_len", _to("ppo.overlong_buffer")),
    ("overlong_penalty_factor", _to("ppo.overlong_penalty")),
    # data
    ("dataset dataset_name prompt_data data.prompt_data prompt_dataset data.train_files train_files train_dataset "
     "dataset_path", _to("data.prompts")),
    ("eval_dataset val_files data.val_files eval.dataset", _to("data.eval_prompts")),
    ("dataset_split dataset_train_split prompt_split", _to("data.split")),
    ("dataset_test_split eval.split", _to("data.eval_split")),
    ("val_size", _to("data.eval_fraction", note="a share of the rows, below 1")),
    ("train_max_samples", _to("data.max_samples")),
    ("cutoff_len max_len prompt_max_len max_length max_seq_len max_seq_length max_prompt_len",
     _to("data.max_prompt_length", note="the answer is limited by sampling.response_length")),
    ("template apply_chat_template", _to("data.chat_template")),
    ("enable_thinking", _to("data.chat_template_kwargs", note="`{enable_thinking: false}`")),
    ("default_system system_message", _to("data.system_prompt")),
    ("input_key prompt_key dataset_text_field", _to("data.columns", note="`{prompt: NAME}`")),
    ("dataset_config dataset_config_name", _to("data.subset")),
    ("dataset_revision", _to("data.revision")),
    # sampling
    ("max_new_tokens max_response_length generate_max_len max_completion_length max_tokens gen_len output_max_length",
     _to("sampling.response_length")),
    ("stop_token_id stop_token_ids eos_token_id", _to("sampling.stop_token", note="the token itself, not its id")),
    ("stop stop_strs stop_words stop_sequences", _to("sampling.stop_strings")),
    ("rollout.top_p", _to("sampling.top_p")),
    ("rollout.top_k", _to("sampling.top_k")),
    ("min_p typical_p repetition_penalty min_length min_new_tokens output_min_length do_sample",
     _absent("answers are drawn from the policy's own distribution, because another one biases the ratio and the KL; "
             "sampling.temperature, sampling.top_p and sampling.top_k are the only options")),
    ("rollout.n n_samples_per_prompt num_return_sequences num_samples_per_prompt",
     _to("sampling.num_generations", note="train.rollout_batch_size counts answers, not prompts")),
    ("use_vllm vllm_mode vllm.num_engines vllm_num_engines rollout.name",
     _to("sampling.vllm", note="`vllm: {}` turns it on; each process that trains has an engine")),
    ("vllm_gpu_memory_utilization rollout.gpu_memory_utilization gpu_memory_utilization vllm_gpu_util",
     _to("sampling.vllm.gpu_memory_utilization")),
    ("vllm_enable_sleep_mode vllm_enable_sleep free_cache_engine vllm.enable_sleep",
     _to("sampling.vllm.enable_sleep_mode")),
    ("vllm_enforce_eager", _to("sampling.vllm.enforce_eager")),
    ("vllm_tensor_parallel_size tensor_model_parallel_size vllm.tensor_parallel_size tensor_parallel_size",
     _absent("the engine of each process is on that process's device alone")),
    ("per_device_eval_batch_size local_rollout_forward_batch_size",
     _to("sampling.batch_size", "train.micro_batch_size", note="the first for decoding, the second for forwards")),
    # algorithm
    ("init_kl_coef init_coef algo.kl.init_coef kl_loss_coef kl_beta beta kl_coeff", _to("ppo.kl_coef")),
    ("kl_penalty estimator algo.kl.estimator kl_loss_type", _to("ppo.kl_estimator")),
    ("use_kl_in_reward use_kl_loss algo.kl.use_loss", _to("ppo.kl_in", note="ppo.kl_coef 0 turns it off")),
    ("target_kl ppo_target kl_ctrl.target_kl algo.kl.target target", _to("ppo.kl_target")),
    ("adap_kl_ctrl kl_ctrl.type", _to("ppo.kl_target", note="a target makes ppo.kl_coef adaptive")),
    ("horizon algo.kl.horizon", _to("ppo.kl_horizon")),
    ("clip_ratio eps_clip clip_range clip_eps cliprange_policy epsilon ratio_clip", _to("ppo.cliprange")),
    ("eps_clip_low clip_ratio_low ratio_clip_min", _to("ppo.cliprange")),
    ("eps_clip_high clip_ratio_high ratio_clip_max epsilon_high", _to("ppo.cliprange_high")),
    ("eps_clip_low_high", _to("ppo.cliprange", "ppo.cliprange_high", note="low and high side")),
    ("clip_ratio_c ratio_clip_c", _to("ppo.dual_clip")),
    ("value_clip clip_range_vf cliprange_vf vf_clip vf_clip_param value_clip_range", _to("ppo.cliprange_value")),
    ("gae_lambda lambd lambda gae_lambda_policy algo.advantage.lambd", _to("ppo.lam")),
    ("gae_lambda_value", _to("ppo.value_lam")),
    ("length_adaptive_alpha", _to("ppo.lam_alpha")),
    ("discount discount_factor", _to("ppo.gamma")),
    ("value_loss_coef vf_loss_coeff vloss_coef", _to("ppo.vf_coef")),
    ("adv_estimator algo.advantage.estimator", _to("ppo.advantage_estimator")),
    ("adv_clip", _to("ppo.advantage_clip")),
    ("entropy_coeff entropy_loss_coef ent_coef", _to("ppo.entropy_coef")),
    ("loss_agg_mode loss_type", _to("ppo.loss_reduction")),
    ("mask_truncated_completions overlong_filtering filter_overlong", _to("ppo.mask_truncated")),
    ("ratio_threshold", _to("ppo.max_ratio")),
    ("ppo_epochs update_epochs max_epochs train.max_epochs num_iterations n_epochs", _to("ppo.num_ppo_epochs")),
    ("mini_batch_size ppo_mini_batch_size",
     _to("ppo.num_mini_batches", note="a mini-batch is train.rollout_batch_size / ppo.num_mini_batches answers")),
    ("ppo_whiten_rewards", _to("ppo.whiten_rewards")),
    ("advantage_batch_normalize normalize_advantage normalize_advantages adv_norm", _to("ppo.whiten_advantages")),
    ("stop_properly_penalty_coef non_eos_penalty penalty_reward_value",
     _to("ppo.missing_eos_penalty", "ppo.missing_eos_score", note="the first subtracts, the second replaces")),
    ("is_correction_enable is_correction_type is_correction_threshold vllm_importance_sampling_correction "
     "vllm_importance_sampling_cap rollout_is rollout_is_threshold tis_imp_ratio_cap",
     _to("ppo.importance_sampling_cap", note="with sampling.vllm; null turns it off")),
    ("unsup_coef positive_example_nll_weight", _to("ppo.ptx_coef", note="with data.ptx, a file of demonstrations")),
    ("pretrain_data unsupervised_dataset_name", _to("data.ptx")),
    # batches and length of a run
    ("batch_size rollout.batch_size data.train_batch_size ppo_buffer_size rollout_buffer_size num_rollouts",
     _to("train.rollout_batch_size")),
    ("train.batch_size train_batch_size",
     _to("train.rollout_batch_size", "ppo.num_mini_batches",
         note="answers per update, and optimizer steps per pass over them")),
    ("per_device_train_batch_size micro_train_batch_size micro_rollout_batch_size micro_batch_size_per_gpu "
     "ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu mbs",
     _to("train.micro_batch_size")),
    ("gradient_accumulation_steps",
     _to("train.micro_batch_size", "train.rollout_batch_size", note="accumulation follows from the two")),
    ("max_tokens_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz dynamic_batch_enable packing_samples "
     "use_remove_padding", _to("train.max_tokens_per_micro_batch", note="padding counts too")),
    ("num_episodes train.num_episodes total_epochs trainer.total_epochs epochs", _to("train.num_train_epochs")),
    ("total_training_steps total_steps steps num_steps", _to("train.max_steps")),
    # optimizer
    ("lr lr_actor actor_learning_rate actor.adam.lr actor.optim.lr actor_rollout_ref.actor.optim.lr",
     _to("train.learning_rate")),
    ("lr_scheduler scheduler", _to("train.lr_scheduler_type")),
    ("num_warmup_steps lr_warmup_steps", _to("train.warmup_steps")),
    ("lr_warmup_ratio lr_warmup_steps_ratio", _to("train.warmup_ratio")),
    ("l2 weight_decay_rate", _to("train.weight_decay")),
    ("adam_eps adam.eps optim_eps", _to("train.adam_epsilon")),
    ("max_norm grad_clip clip_grad max_gradient_norm gradient_clip", _to("train.max_grad_norm")),
    ("optimizer optimizer_type optim_type adam_kind", _to("train.optim")),
    ("enable_ema ema_beta", _to("train.ema_decay")),
    ("random_seed data_seed", _to("train.seed")),
    ("gradient_checkpointing_enable enable_gradient_checkpointing disable_gradient_checkpointing",
     _to("train.gradient_checkpointing")),
    ("torch_compile", _to("train.compile")),
    ("deepspeed deepspeed_config fsdp fsdp_config",
     _absent("the launcher sets it: accelerate launch --config_file examples/accelerate/zero3.yaml -m tether ppo …")),
    # evaluation, saving, logging
    ("eval_strategy evaluation_strategy test_freq eval.steps num_sample_generations val_before_train",
     _to("train.eval_steps")),
    ("log_val_generations", _absent("samples.jsonl has every answer of an evaluation")),
    ("save_freq save_strategy ckpt.save_steps save_interval", _to("train.save_steps")),
    ("max_ckpt_num ckpt.max_num max_checkpoints_to_keep max_actor_ckpt_to_keep", _to("train.save_total_limit")),
    ("resume_from_checkpoint resume_mode ckpt.load_enable load_checkpoint", _to("resume")),
    ("log_with logger use_wandb", _to("train.report_to")),
    ("experiment_name exp_name wandb_run_name", _to("train.run_name")),
    ("save_path default_local_dir ckpt_path checkpoint_dir", _to("output_dir")),
    ("overwrite_output", _to("overwrite_output_dir")),
    ("dataset_num_proc preprocessing_num_workers dataloader_num_workers",
     _absent("data is read and tokenized in the process that trains")),
    ("plot_loss", _absent("report.html in the output folder has every curve")),
    ("push_to_hub_model_id", _to("train.hub_model_id")),
    ("stage do_train", _absent("the command selects the stage: `tether ppo`, `tether reward`")),
)


def alias(path: str) -> Alias | None:
    """What another system's key is called here, None if no system that we know calls anything so.

    Args:
        path: the key from the top, joined by dots.
    """
    parts = path.split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))
    return next((ALIASES[name] for name in names if name in ALIASES), None)
