"""Every key of a run, with its default. The strings under the fields are the command line's help and the docs table.

This package imports neither torch nor transformers: a mistake in a configuration is found in well under a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from tether.config.base import (
    LARGEST_DEFAULT,
    Fraction,
    HeldOut,
    OutputDir,
    Section,
    Seed,
    check_precision,
    check_warmup,
    divisors,
    passes_over,
)
from tether.config.chat import Columns, DataKeys, Sources
from tether.config.idle import idle
from tether.config.keys import counted, shown
from tether.config.model import ModelConfig, check_weights
from tether.config.rewards import RewardConfig, reward_names, sources_of

COPIED = {"adapter": ("adapter",), "model": ("model", "adapter")}
"""Types of a first reward source that a critic of each kind can be copied from."""


class ValueConfig(Section):
    """The critic."""

    kind: Literal["adapter", "model", "head"] | None = None
    """``adapter``: a second LoRA adapter with its own head, on the policy's base. ``model``: a separate model.
    ``head``: a value head on the policy itself. Default: adapter with LoRA, model otherwise."""
    init: str | None = None
    """What the critic is initialized from: ``reward`` (the reward model or reward adapter), ``policy``, or the path of
    a sequence classifier (kind model) or reward adapter (kind adapter). Default: reward if the first reward source can
    be copied, else policy. A copy of the reward source is put on the scale of the scores that are trained on: at the
    first update the source's weight and norm, ``ppo.score_norm`` and the mean of other sources' contributions are built
    into its head. A path is taken as it is. A head initialized from the policy starts at zero."""
    learning_rate: NonNegativeFloat | None = None
    """Learning rate of the critic; 0 leaves it as it is. Default: the policy's. Not for kind head, which shares the
    policy's optimizer."""
    warmup_steps: NonNegativeInt = 0
    """Number of updates at the beginning that train only the critic and leave the policy unchanged. Source: VC-PPO,
    https://arxiv.org/abs/2503.01491 (value pretraining)."""
    detach: bool = False
    """Kind head only: keep the gradient of the value loss out of the policy's weights."""
    save: bool = False
    """At the end, also save the critic, to ``critic`` in ``output_dir``: a sequence classifier, or with LoRA an adapter
    of one. Its scores are the critic's values, and it can initialize the critic of another run (``value.init``). The
    head of a critic copied from the reward source has a bias if that source has a ``norm``, ``ppo.score_norm`` is set,
    or there are several sources. Tether loads the bias, plain transformers ignores it: there the scores differ by a
    constant."""

    @property
    def init_path(self) -> str | None:
        """The path in ``init``, if it is one."""
        return None if self.init in ("reward", "policy") else self.init


class DataConfig(DataKeys):
    """The prompts."""

    prompts: Sources
    """Prompts to train on: a .jsonl, .json, .csv or .parquet file, a folder saved by datasets, a hub id, or a list of
    these. The column ``prompt`` (or ``messages``) holds text or chat messages; other columns are passed to the reward
    functions."""
    eval_prompts: Sources | None = None
    """Held-out prompts, in the same forms."""
    eval_fraction: HeldOut | None = None
    """Share of ``prompts`` to hold out instead, drawn by ``train.seed``. Equal prompts stay on the same side."""
    split: str = "train"
    """Split of ``prompts`` to read if the source has several; parts as ``train[:1000]``, ``train[90%:]`` and
    ``train+test``."""
    subset: str | None = None
    """Subset of ``prompts`` to read if the hub dataset or folder has several (``main`` of ``openai/gsm8k``)."""
    revision: str | None = None
    """Branch, tag or commit of ``prompts`` on the hub."""
    eval_split: str = "train"
    """The same for ``eval_prompts``. If the source has only one split, that is read, whatever its name."""
    eval_subset: str | None = None
    """The same for ``eval_prompts``."""
    eval_revision: str | None = None
    """The same for ``eval_prompts``."""
    max_prompt_length: PositiveInt = 512
    """Maximum length of a prompt in tokens, chat template included. Longer prompts are dropped and counted."""
    ptx: Sources | None = None
    """Demonstrations for ``ppo.ptx_coef``, in the same file formats as ``prompts``: rows with ``prompt`` and
    ``completion``, with ``messages`` that end with an assistant turn, or with plain ``text``."""
    ptx_split: str = "train"
    """Split of ``ptx`` to read if the source has several."""
    ptx_subset: str | None = None
    """Subset of ``ptx`` to read if the source has several."""
    ptx_revision: str | None = None
    """Branch, tag or commit of ``ptx`` on the hub."""
    ptx_columns: Columns = Field(default_factory=dict)
    """``columns`` for ``ptx``."""
    max_ptx_length: PositiveInt = 1024
    """Maximum length of a demonstration in tokens. Longer ones are dropped and counted."""

    @property
    def has_eval(self) -> bool:
        """Whether prompts are held out."""
        return self.eval_prompts is not None or bool(self.eval_fraction)

    @model_validator(mode="after")
    def _one_held_out_source(self) -> DataConfig:
        if self.eval_prompts is not None and self.eval_fraction is not None:
            raise ValueError(
                f"eval_prompts ({self.eval_prompts}) and eval_fraction ({self.eval_fraction}) both name held-out "
                "prompts: set one of them"
            )
        return self


class VLLMConfig(Section):
    """Generation by vLLM instead of transformers."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Share of the GPU's memory for vLLM's copy of the policy, and for keys and values. On a CPU: share of the
    machine's memory for keys and values, divided among the processes."""
    enable_sleep_mode: bool = False
    """Free the GPU's memory that vLLM takes while no answers are generated, so that the update has it. Each rollout
    then begins with a copy of the weights."""
    enforce_eager: bool = False
    """Run vLLM's forward passes without torch.compile and CUDA graphs: the start is faster, generation slower."""


class SamplingConfig(Section):
    """How answers are sampled."""

    response_length: PositiveInt = 53
    """Maximum length of an answer in tokens, end token included."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling and of every log-probability."""
    stop_token: str | None = "eos"
    """``eos``: every end token of the model's generation config and tokenizer ends an answer. Any other string: only
    that token does. null: only the length limit and ``stop_strings`` do. Judges that read text do not see the token."""
    stop_strings: str | list[str] = Field(default_factory=list)
    """Strings that also end an answer, as soon as its text contains one of them, whatever its tokens are: for base
    models and formats of your own. Judges, samples and conversations get the text before the string; its tokens are
    sampled and trained on like the others. Use double quotes: ``["\\nHuman:", "###"]``."""
    batch_size: PositiveInt = 64
    """Number of answers generated side by side; with vLLM, the most. The answers do not depend on it, except for
    rounding."""
    cache_implementation: Literal["dynamic", "static"] = "dynamic"
    """Cache for keys and values during generation, by its name in transformers. ``dynamic``: the cache grows with the
    text, and finished answers leave it. ``static``: the cache has a fixed size, and finished answers stay until the
    last one of their batch ends. On an accelerator, ``static`` also compiles the forward pass of a token, on a GPU into
    CUDA graphs; this pays off if answers have similar lengths. Models with recurrent states always use ``dynamic``; the
    log says so. ``static`` does not work with flash attention."""
    vllm: VLLMConfig | None = None
    """Generate answers with vLLM instead of transformers. Needs ``pip install 'tether[vllm]'``. ``vllm: {}`` uses the
    defaults. The engine runs in the process that trains, on the same device, and gets the policy's weights after every
    update; see ``ppo.importance_sampling_cap``."""
    num_generations: PositiveInt = 1
    """Answers per prompt in a rollout batch, whose size counts answers. rloo and grpo compare them with each other."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this value; 1 samples from all. Needs
    ``allow_truncated_sampling``."""
    top_k: PositiveInt | None = None
    """Sample only from this many most likely tokens. Default: from all. Needs ``allow_truncated_sampling``."""
    allow_truncated_sampling: bool = False
    """Allow ``top_p`` and ``top_k``. They bias PPO: ratio and KL are still those of the full distribution, from which
    the answers then no longer come, so the measured KL is not a real KL and can fall below 0."""

    @field_validator("stop_strings", mode="before")
    @classmethod
    def _one_or_more(cls, strings: Any) -> Any:
        if strings is None:
            raise ValueError(
                "got null; wanted text or a list of text, in quotes as # begins a comment; or leave it out"
            )
        listed = [strings] if isinstance(strings, str) else strings
        if isinstance(listed, list) and "" in listed:
            raise ValueError(f"entry {listed.index('')} is empty, which would end every answer at once: remove it")
        return listed

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_p < 1.0 or self.top_k is not None

    @model_validator(mode="after")
    def _truncation_is_wanted(self) -> SamplingConfig:
        if self.is_truncated and not self.allow_truncated_sampling:
            given = f"top_p {self.top_p:g}" if self.top_p < 1.0 else f"top_k {self.top_k}"
            raise ValueError(
                f"{given} draws answers from a distribution other than the one whose ratio and KL are computed, which "
                "biases both: leave it out, or add allow_truncated_sampling: true"
            )
        return self


class PPOConfig(Section):
    """The algorithm."""

    kl_coef: NonNegativeFloat = 0.05
    """Coefficient β of the KL penalty. With 0, no reference model is run."""
    kl_in: Literal["reward", "loss"] = "reward"
    """``reward``: −β·kl is part of each token's reward. ``loss``: β·KL(π ‖ ref) of each token, with its importance
    weight, is added to the loss; β is divided by the standard deviation of the advantages if those are whitened and not
    all equal. Only k1 in the reward has the exact gradient of the sequence KL; the loss ignores the effect of a token
    on later ones. Source: https://arxiv.org/abs/2510.01555."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL: k1 = −r, k2 = r²/2, k3 = eʳ − 1 − r with r = log ref − log π. k2 and k3 are biased
    in the reward. Source: http://joschu.net/blog/kl-approx.html."""
    kl_target: PositiveFloat | None = None
    """Target KL in nats per answer for an adaptive coefficient, which starts at ``kl_coef``. Default: ``kl_coef`` stays
    fixed. Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593."""
    kl_horizon: PositiveInt = 10_000
    """Number of episodes over which the adaptive coefficient reacts."""
    num_ppo_epochs: PositiveInt = 4
    """Passes over each rollout batch."""
    num_mini_batches: PositiveInt = 1
    """Mini-batches per pass; each is one optimizer step."""
    max_approx_kl: PositiveFloat | None = None
    """Early stopping of an update: it ends before the optimizer step of a mini-batch whose mean KL(π_old ‖ π) per token
    exceeds this value (usually .02 to .05). Default: never."""
    max_ratio: Annotated[float, Field(gt=1.0)] | None = None
    """Early stopping of an update: it ends before the optimizer step of a mini-batch whose mean ratio π/π_old over
    tokens exceeds this value (10 in older releases of TRL). Default: never."""
    cliprange: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Policy ratio is clipped to [1 − cliprange, 1 + cliprange]. Source: Schulman et al. 2017,
    https://arxiv.org/abs/1707.06347, eq. 7."""
    cliprange_high: PositiveFloat | None = None
    """Upper side of the clip, 1 + cliprange_high. Default: ``cliprange``. .28 with a cliprange of .2 preserves entropy.
    Source: DAPO, https://arxiv.org/abs/2503.14476."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Limits the loss of a token with negative advantage A to −A·dual_clip; usually 3. Default: no limit. Source: Ye et
    al. 2020, https://arxiv.org/abs/1912.09729."""
    importance_sampling_cap: Annotated[float, Field(ge=1.0)] | None = 2.0
    """With ``sampling.vllm``, the policy loss of each token is multiplied by its importance weight, at most this cap:
    min(π_old / π_vllm, cap), where π_vllm is what vLLM drew the token with, and π_old is computed by the policy's own
    forward pass. The two differ by rounding, and with ``top_p`` or ``top_k`` by what these cut off. null: no weights.
    Source: truncated importance sampling, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl."""
    cliprange_value: PositiveFloat | None = 0.2
    """New values are clipped to within this distance of the old ones; null turns clipping off."""
    vf_coef: PositiveFloat = 0.1
    """Weight of the value loss if policy and critic share an optimizer (``value.kind: head``); other critics have their
    own optimizer."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: entropy_coef times the policy's entropy at each token is subtracted from the
    loss."""
    loss_reduction: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How the token losses are reduced. ``token_mean``: mean over the response tokens of the optimizer step.
    ``sequence_mean``: mean over answers of the mean of each answer. ``fixed_length``: sum over tokens divided by the
    number of answers times response_length. Sources: DAPO; GRPO, https://arxiv.org/abs/2402.03300;
    https://arxiv.org/abs/2503.20783."""
    ptx_coef: NonNegativeFloat = 0.0
    """Weight γ of an SFT loss on the demonstrations of ``data.ptx``, added to the policy's loss in every optimizer step
    (27.8 in InstructGPT, https://arxiv.org/abs/2203.02155, eq. 2)."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount factor per token."""
    advantage_estimator: Literal["gae", "rloo", "grpo", "reinforce_pp"] = "gae"
    """``gae``: generalized advantage estimation with a critic. The others have no critic. ``rloo``: return minus the
    mean return of the prompt's other answers. ``grpo``: score minus the mean score of the prompt's answers, divided by
    their standard deviation; the KL penalty minus its mean is added unnormalized. ``reinforce_pp``: return to go.
    Sources: https://arxiv.org/abs/1506.02438, https://arxiv.org/abs/2402.14740, https://arxiv.org/abs/2402.03300,
    https://arxiv.org/abs/2501.03262."""
    lam: Fraction = 0.95
    """λ of generalized advantage estimation. Use 1 for answers much longer than 128 tokens."""
    value_lam: Fraction | None = None
    """λ of the critic's targets. Default: ``lam``. Use 1 with long answers. Source: VC-PPO."""
    lam_alpha: PositiveFloat | None = None
    """Length-adaptive λ for the policy instead of ``lam``: 1 − 1/(lam_alpha · l) for an answer of l tokens, at least 0.
    The critic's targets still use ``value_lam`` or ``lam``. Source: VAPO, https://arxiv.org/abs/2504.05118 (.05)."""
    whiten_rewards: bool = False
    """Scale token rewards to unit variance over the rollout batch, keeping their mean. Changes the objective."""
    whiten_advantages: bool | None = None
    """Scale advantages to mean 0 and variance 1 over all response tokens of the rollout batch. Default: on for gae and
    reinforce_pp, off for rloo and grpo."""
    advantage_clip: PositiveFloat | None = None
    """Clips advantages to within ±advantage_clip, after whitening. Default: no clipping."""
    score_norm: Literal["frozen", "running"] | None = None
    """Normalize scores: subtract a mean and divide by a standard deviation. ``frozen``: those of the start policy's
    scores, measured once before the first update. ``running``: those of all scores so far, as in LLaMA-Factory; the
    objective then changes during training. Default: scores stay unchanged. Source of frozen: Ziegler et al. 2019;
    Stiennon et al. 2020."""
    score_norm_samples: Annotated[int, Field(ge=2)] = 256
    """Number of the start policy's answers that ``frozen``, and ``norm: auto`` of a reward source, are measured on."""
    reward_clip: PositiveFloat | None = None
    """Clips scores to within ±reward_clip, after score_norm. Default: no clipping."""
    missing_eos_penalty: NonNegativeFloat | None = None
    """Subtracted from the score of an answer that did not end by itself, after score_norm and reward_clip."""
    missing_eos_score: float | None = None
    """Replaces the score of an answer that did not end by itself, after score_norm and reward_clip."""
    overlong_buffer: PositiveInt | None = None
    """Soft penalty on long answers: 0 up to response_length − overlong_buffer tokens, then falling linearly to
    −overlong_penalty at response_length. Default: no penalty. Source: DAPO, eq. 13."""
    overlong_penalty: PositiveFloat = 1.0
    """Maximum of the soft penalty."""
    mask_truncated: bool = False
    """Exclude answers that did not end by themselves from all losses. Source: DAPO (overlong filtering)."""

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic."""
        return self.advantage_estimator == "gae"

    @property
    def compares_answers(self) -> bool:
        """Whether advantages come from a comparison with the prompt's other answers."""
        return self.advantage_estimator in ("rloo", "grpo")

    @property
    def whitens_advantages(self) -> bool:
        """Whether advantages are whitened, the default resolved."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return not self.compares_answers

    @model_validator(mode="after")
    def _one_eos_rule(self) -> PPOConfig:
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise ValueError(
                f"missing_eos_penalty ({self.missing_eos_penalty}) subtracts and missing_eos_score "
                f"({self.missing_eos_score}) replaces: set one of them"
            )
        return self


class TrainConfig(Section):
    """Batches, optimizer, evaluation, saving."""

    total_episodes: PositiveInt | None = None
    """Number of answers to train on. Set exactly one of total_episodes, num_train_epochs and max_steps."""
    num_train_epochs: PositiveFloat | None = None
    """Passes over the prompts."""
    max_steps: PositiveInt | None = None
    """Number of updates, one rollout batch each."""
    rollout_batch_size: PositiveInt = 64
    """Answers per update."""
    micro_batch_size: PositiveInt | None = None
    """Answers in one forward and backward pass of a process; must divide the mini-batch. Default: the largest number up
    to 8 that fits the mini-batch and the processes, unless max_tokens_per_micro_batch is set."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Instead of micro_batch_size: as many answers per pass as fit into this many tokens, padding included."""
    learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the policy; 0 leaves it as it is, so that every ratio is 1. Default: 5e-5 with LoRA, 3e-6
    otherwise."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "greedy",
    ] = "linear"
    """Learning rate schedule over the optimizer steps, by its name in transformers."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the schedule, by their names in transformers: ``{min_lr_rate: 0.1}`` for cosine_with_min_lr.
    reduce_lr_on_plateau and greedy follow ``objective/scores`` (larger is better); greedy needs ``min_lr`` and may
    raise the rate up to its ``max_lr``."""
    warmup_ratio: Fraction = 0.0
    """Share of the optimizer steps over which the learning rate rises from 0."""
    warmup_steps: PositiveInt | None = None
    """Number of updates over which the learning rate rises from 0, instead of warmup_ratio."""
    optim: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit"] = "adamw_torch_fused"
    """AdamW variant, by its name in transformers. ``adamw_torch_fused``: one kernel for all tensors, on a CPU as well.
    ``adamw_torch``: one tensor after the other. ``adamw_8bit``: 8-bit moments with bitsandbytes, a quarter of their
    memory; needs ``pip install 'tether[quant]'``. Source: https://arxiv.org/abs/2110.02861."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW β₁."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """AdamW β₂."""
    adam_epsilon: PositiveFloat = 1e-5
    """AdamW ε."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum gradient norm, clipped separately for policy and critic unless they share an optimizer; null turns
    clipping off."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of an exponential moving average of the policy's weights, updated once per update. The average is evaluated
    and saved in place of the policy (.992 in InstructGPT). Default: no average."""
    bf16: bool | None = None
    """Run all forward passes under bfloat16 autocast. Default: on if the hardware is faster that way and ``fp16`` is
    off, or if ``mixed_precision`` of ``accelerate launch`` is bf16."""
    fp16: bool = False
    """Run all forward passes under float16 autocast, for hardware without bfloat16 (V100, T4). Losses are scaled before
    backward, so that small gradients are not lost; optimizer steps whose scaled gradients overflow are skipped. Also on
    if ``mixed_precision`` of ``accelerate launch`` is fp16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the update to save memory; never on during generation."""
    compile: bool = False
    """Run the layers of policy, reference and critic through torch.compile, in the passes over the answers and in the
    update but not in generation. The first passes take longer. The two kinds of pass then differ by rounding, so the
    first ratio is only close to 1."""
    offload_idle_roles: bool = False
    """Keep separate frozen models (the reference of full fine-tuning, reward models) on the CPU while they are not
    used. Policy and critic stay on the device, because their gradients and moments, three times their size, stay there
    too. No effect on a CPU."""
    seed: Seed = 42
    """Seed of sampling, data order and initialization."""
    logging_steps: PositiveInt = 1
    """Updates between two reports to trackers and callbacks; metrics.jsonl has every update."""
    log_samples: NonNegativeInt = 8
    """Training answers per update that are written to samples.jsonl."""
    eval_steps: PositiveInt | None = None
    """Updates between two evaluations on the held-out prompts. Default: only before the first update and after the
    last."""
    save_steps: PositiveInt | None = None
    """Updates between two checkpoints. Default: only the final model is saved."""
    save_total_limit: PositiveInt | None = None
    """Number of checkpoints to keep: the newest ones, and always the best one."""
    metric_for_best_model: str | None = None
    """Evaluation metric that decides which checkpoint is the best, for example ``eval_scores``. Each evaluation that is
    the best so far saves a checkpoint."""
    greater_is_better: bool = True
    """Whether a larger ``metric_for_best_model`` is better."""
    load_best_model_at_end: bool = False
    """At the end, put the best checkpoint at the root of ``output_dir`` instead of the last policy."""
    report_to: str | list[str] = "none"
    """Trackers of Accelerate to log to: none, all, tensorboard, wandb, trackio, … A tracker's project comes from the
    environment (``WANDB_PROJECT``, ``TRACKIO_PROJECT``, ``SWANLAB_PROJECT``, ``CLEARML_PROJECT``,
    ``COMET_PROJECT_NAME``); default: tether."""
    run_name: str | None = None
    """Name of the run in the trackers. Default: the name of ``output_dir``."""
    max_runtime: PositiveFloat | None = None
    """Hours after which the run saves its state and ends with exit code 130."""
    max_bad_batches: NonNegativeInt = 3
    """Batches in a row that may be skipped because a log-probability, value, loss or gradient is not finite: a
    mini-batch in the update, or a whole rollout batch before it. One more ends the run."""
    ddp_timeout: PositiveInt = 1800
    """Seconds that the processes of a run wait for each other before the run ends."""
    ds3_gather_for_generation: bool = True
    """If weights are sharded over processes (FSDP2, ZeRO-3), gather the policy's weights once for all answers of a
    rollout; every process then holds all of them meanwhile. false: gather them layer by layer for every token, so that
    no process ever holds more than one full layer. The rollout then waits for the network at each layer of each token,
    and all processes wait for the longest answer."""
    dry_step: bool | None = None
    """Before training, run one micro-batch of the longest lengths forward and backward, and generate as many of the
    longest answers as are generated side by side, without effect on the run. This tells whether the run fits into
    memory, and halves what does not fit. Default: on if there is an accelerator."""
    push_to_hub: bool = False
    """At the end, push the trained policy with its model card to the Hugging Face hub. The token is that of ``hf auth
    login`` or HF_TOKEN."""
    hub_model_id: str | None = None
    """Repository to push to, OWNER/NAME. Default: the name of ``output_dir``, owned by the token's owner."""
    hub_private_repo: bool = True
    """Whether a new repository is private."""

    @model_validator(mode="after")
    def _cross_checks(self) -> TrainConfig:
        check_precision(self.bf16, self.fp16)
        lengths = {k: getattr(self, k) for k in ("total_episodes", "num_train_epochs", "max_steps")}
        given = {k: v for k, v in lengths.items() if v is not None}
        if len(given) != 1:
            got = ", ".join(f"{k}={v}" for k, v in given.items()) or "none of them"
            raise ValueError(f"set exactly one of total_episodes, num_train_epochs and max_steps; got {got}")
        check_warmup(self.warmup_ratio, self.warmup_steps)
        if self.micro_batch_size is not None and self.max_tokens_per_micro_batch is not None:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) counts answers and max_tokens_per_micro_batch "
                f"({self.max_tokens_per_micro_batch}) tokens: set one of them"
            )
        micro = self.micro_batch_size
        if micro is not None and self.rollout_batch_size % micro:
            raise ValueError(_divide("micro_batch_size", micro, "rollout_batch_size", self.rollout_batch_size))
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            raise ValueError("load_best_model_at_end needs metric_for_best_model, for example eval_scores")
        return self


class RunConfig(Section):
    """One PPO run."""

    model: ModelConfig
    """The policy."""
    value: ValueConfig = ValueConfig()
    """The critic."""
    rewards: list[RewardConfig] = Field(min_length=1)
    """Judges of the answers; the score is their weighted sum."""
    data: DataConfig
    """The prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """How answers are sampled."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    train: TrainConfig
    """Batches, optimizer, evaluation, saving."""
    output_dir: OutputDir
    """Folder for the trained policy and everything else that the run writes."""
    overwrite_output_dir: bool = False
    """Start again in a folder that holds an earlier run, and replace its files."""
    resume: bool | str = False
    """true: continue from the newest complete checkpoint in ``output_dir``; a path: from that checkpoint; auto: as
    true, but start if no update was recorded yet, and train nothing if the run is finished, for launchers that restart
    a run by themselves."""

    @property
    def reward_names(self) -> list[str]:
        """Names of the reward sources in metrics and samples, unique."""
        return reward_names(self.rewards)

    @property
    def value_kind(self) -> Literal["adapter", "model", "head"] | None:
        """The critic's kind, the default resolved; None if advantages need no critic."""
        if not self.ppo.has_critic:
            return None
        return self.value.kind or ("adapter" if self.model.lora else "model")

    @property
    def importance_cap(self) -> float | None:
        """Cap of the tokens' importance weights; None if there are none, as where the policy itself generates."""
        return None if self.sampling.vllm is None else self.ppo.importance_sampling_cap

    @property
    def learning_rate(self) -> float:
        """The policy's peak learning rate, the default resolved."""
        rate = self.train.learning_rate
        return (5e-5 if self.model.lora else 3e-6) if rate is None else rate

    @property
    def critic_learning_rate(self) -> float:
        """The peak learning rate of a critic with an optimizer of its own, the default resolved."""
        return self.learning_rate if self.value.learning_rate is None else self.value.learning_rate

    def resolved(self, *, bf16: bool, fp16: bool = False, num_processes: int = 1) -> RunConfig:
        """The same run with every default filled in that depends on other keys, on the machine or on the launch.

        Args:
            bf16: whether the machine has bfloat16 arithmetic; used if ``train.bf16`` is left out.
            fp16: whether the launcher asks for float16.
            num_processes: number of processes of the run.
        """
        fp16 = self.train.fp16 or fp16
        value = self.value.model_copy(update={"kind": self.value_kind}) if self.ppo.has_critic else self.value
        ppo = self.ppo.model_copy(update={"whiten_advantages": self.ppo.whitens_advantages})
        filled = {
            "learning_rate": self.learning_rate,
            "bf16": bf16 and not fp16 if self.train.bf16 is None else self.train.bf16,
            "fp16": fp16,
            "micro_batch_size": self.max_rows_per_micro_batch(num_processes),
        }
        return self.model_copy(
            update={"value": value, "ppo": ppo, "train": self.train.model_copy(update=filled)}
        )

    @property
    def mini_batch_size(self) -> int:
        """Answers per optimizer step."""
        return self.train.rollout_batch_size // self.ppo.num_mini_batches

    def max_rows_per_micro_batch(self, num_processes: int = 1) -> int | None:
        """Answers in one forward and backward pass of a process, the default resolved; None with a token budget."""
        train, mini = self.train, self.mini_batch_size
        if train.max_tokens_per_micro_batch is not None or train.micro_batch_size is not None:
            return train.micro_batch_size
        fits = divisors(mini, most=LARGEST_DEFAULT)
        return next((rows for rows in fits if mini % min(rows * num_processes, mini) == 0), fits[0])

    def answers_at_once(self, num_processes: int) -> int:
        """Answers that the processes of a run train on at once, with a token budget the most of them.

        Raises:
            ValueError: mini-batches would not hold equally many answers.
        """
        micro, mini = self.max_rows_per_micro_batch(num_processes), self.mini_batch_size
        if micro is None:
            return mini
        at_once = min(micro * num_processes, mini)
        if mini % at_once:
            raise ValueError(
                f"train.micro_batch_size {micro} in each of {counted(num_processes, 'process')} makes "
                f"{counted(at_once, 'answer')} at once, which must divide the mini-batch size {mini}: "
                "launch a different number of processes, or change train.rollout_batch_size, "
                "ppo.num_mini_batches or train.micro_batch_size"
            )
        return at_once

    @property
    def prompts_per_update(self) -> int:
        """Prompts of a rollout batch, each answered ``sampling.num_generations`` times."""
        return self.train.rollout_batch_size // self.sampling.num_generations

    def num_updates(self, num_prompts: int) -> int:
        """Updates that the run makes over ``num_prompts`` usable prompts; every prompt is seen in each epoch."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        answers = num_prompts * self.sampling.num_generations
        episodes = self.train.total_episodes or passes_over(answers, self.train.num_train_epochs)
        return math.ceil(episodes / self.train.rollout_batch_size)

    @model_validator(mode="after")
    def _check_batches(self) -> RunConfig:
        rollout, minis = self.train.rollout_batch_size, self.ppo.num_mini_batches
        micro, answers = self.train.micro_batch_size, self.sampling.num_generations
        if rollout % minis:
            raise ValueError(_divide("ppo.num_mini_batches", minis, "train.rollout_batch_size", rollout))
        if micro is not None and self.mini_batch_size % micro:
            raise ValueError(_divide("train.micro_batch_size", micro, "the mini-batch size", self.mini_batch_size))
        if rollout % answers:
            raise ValueError(_divide("sampling.num_generations", answers, "train.rollout_batch_size", rollout))
        if self.ppo.compares_answers and answers < 2:
            raise ValueError(
                f"ppo.advantage_estimator {self.ppo.advantage_estimator} compares answers to the same prompt: set "
                f"sampling.num_generations to 2 or more, got {answers}"
            )
        horizon = self.ppo.kl_horizon
        if self.ppo.kl_target is not None and 5 * horizon <= rollout:
            raise ValueError(
                f"ppo.kl_horizon {horizon} is too short for train.rollout_batch_size {rollout}: one update could "
                f"reduce kl_coef to 0. Set it to at least {rollout // 5 + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> RunConfig:
        check_weights(self.model, fp16=self.train.fp16)
        return self

    @model_validator(mode="after")
    def _check_cache(self) -> RunConfig:
        kernel, cache = self.model.attn_implementation, self.sampling.cache_implementation
        if cache == "static" and kernel is not None and "flash" in kernel:
            raise ValueError(
                f"sampling.cache_implementation static does not work with model.attn_implementation {kernel}: flash "
                "attention also reads the part of the cache that no token has filled yet. Set cache_implementation to "
                "dynamic, or attn_implementation to sdpa"
            )
        return self

    @model_validator(mode="after")
    def _check_sharing(self) -> RunConfig:
        if len(set(self.reward_names)) != len(self.reward_names):
            raise ValueError(f"rewards: names must be unique, got {', '.join(self.reward_names)}")
        if any(reward.type == "adapter" for _, reward in sources_of(self.rewards)) and self.model.lora is None:
            raise ValueError(
                "rewards: type adapter shares the policy's base, which full fine-tuning changes: add `lora: {}` under "
                "model, or use type model"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> RunConfig:
        kind, value = self.value_kind, self.value
        if not self.ppo.has_critic:
            if value != ValueConfig():
                raise ValueError(
                    f"value: there is no critic with ppo.advantage_estimator {self.ppo.advantage_estimator}; leave the "
                    "section out, or set advantage_estimator to gae"
                )
            return self
        if kind == "adapter" and self.model.lora is None:
            raise ValueError(
                "value.kind adapter needs model.lora: add `lora: {}` under model, or set value.kind to model or head"
            )
        if kind == "head" and value.learning_rate is not None:
            raise ValueError(
                "value.learning_rate: kind head shares the policy's optimizer; set value.kind to model or adapter, or "
                "leave it out"
            )
        if kind == "head" and value.init not in (None, "policy"):
            raise ValueError(
                f"value.init {value.init}: kind head starts from the policy; set value.kind to model or adapter"
            )
        if value.init == "reward" and (first := self.rewards[0].type) not in COPIED[kind]:
            raise ValueError(
                f"value.init reward: the first reward is of type {first}, but a critic of kind {kind} is copied from "
                f"{' or '.join(COPIED[kind])}; put such a reward first, or set value.init to policy"
            )
        if value.detach and kind != "head":
            raise ValueError(f"value.detach is for value.kind head; kind {kind} never touches the policy's weights")
        return self

    @model_validator(mode="after")
    def _check_demonstrations(self) -> RunConfig:
        if self.ppo.ptx_coef > 0 and self.data.ptx is None:
            raise ValueError(f"ppo.ptx_coef {self.ppo.ptx_coef} needs data.ptx, a file of demonstrations")
        if self.data.ptx is not None and self.ppo.ptx_coef == 0:
            raise ValueError("data.ptx is not used at ppo.ptx_coef 0: set the coefficient, or leave data.ptx out")
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> RunConfig:
        metric = self.train.metric_for_best_model
        asked = {"eval_steps": self.train.eval_steps, "metric_for_best_model": metric}
        without = next((key for key, value in asked.items() if value is not None), None)
        if without is not None and not self.data.has_eval:
            raise ValueError(f"train.{without} needs data.eval_prompts or data.eval_fraction")
        known = ["eval_scores", "eval_length", "eval_eos_rate", *(f"eval_rewards/{name}" for name in self.reward_names)]
        known += ["eval_kl"] if self.ppo.kl_coef > 0 else []
        if metric is not None and metric not in known:
            raise ValueError(f"train.metric_for_best_model: got {metric}, wanted one of {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _check_ends(self) -> RunConfig:
        ppo, longest = self.ppo, self.sampling.response_length
        rules = {
            "missing_eos_penalty": bool(ppo.missing_eos_penalty),
            "missing_eos_score": ppo.missing_eos_score is not None,
            "mask_truncated": ppo.mask_truncated,
        }
        rule = next((key for key, is_set in rules.items() if is_set), None)
        if rule is not None and self.sampling.stop_token is None and not self.sampling.stop_strings:
            raise ValueError(
                f"ppo.{rule}: with sampling.stop_token null no answer ends; set stop_token to eos, or stop_strings"
            )
        if ppo.overlong_buffer is not None and ppo.overlong_buffer > longest:
            raise ValueError(
                f"ppo.overlong_buffer {ppo.overlong_buffer} is longer than sampling.response_length {longest}: set it "
                f"to at most {longest}"
            )
        return self

    @model_validator(mode="after")
    def _every_key_is_read(self) -> RunConfig:
        def value(key: str) -> Any:
            return reduce(getattr, key.split("."), self)

        for key, why in idle(value, default_of):
            raise ValueError(f"{key} {shown(value(key))}: {why}")
        return self


def default_of(key: str) -> Any:
    """The value that a key of one of a run's sections, ``SECTION.KEY``, has if it is left out."""
    section, name = key.split(".")
    return RunConfig.model_fields[section].annotation.model_fields[name].get_default(call_default_factory=True)


def without_idle(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of a run without those that are set to something and would not be read; and why these would not, by key.

    For configurations of other systems, whose defaults are not ours.
    """

    def value(key: str) -> Any:
        if "." not in key:
            return config[key]
        section, name = key.split(".")
        return config.get(section, {}).get(name, default_of(key))

    left_out = dict(idle(value, default_of))
    kept = {
        section: {name: x for name, x in inner.items() if f"{section}.{name}" not in left_out}
        if isinstance(inner, Mapping)
        else inner
        for section, inner in config.items()
    }
    return kept, left_out


def _divide(small: str, value: int, large: str, total: int) -> str:
    """Says that ``value`` must divide ``total``, with the nearest values that do."""
    around = range(max(1, value - 4096), min(total, value + 4096) + 1)
    fits = [d for d in around if total % d == 0] or [1, total]
    near = sorted(sorted(fits, key=lambda d: abs(d - value))[:2])
    return f"{small} {value} must divide {large} {total}: try {' or '.join(map(str, near))}"
