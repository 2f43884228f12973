"""Models in memory, as the roles of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tether.config.schema import RunConfig
from tether.errors import ConfigError, ModelError
from tether.models import fit
from tether.models.adapters import (
    Adapter,
    adapter_parameters,
    changed_config,
    check_linear,
    check_shareable,
    with_adapter,
)
from tether.models.bitsandbytes import is_quantized
from tether.models.build import check_token_ids, finished
from tether.models.device import half_dtype
from tether.models.forward import few_tokens
from tether.models.heads import ScalarHead
from tether.models.layers import num_rows
from tether.models.paths import absolute_source, model_errors, some_of
from tether.models.preprocessing import read_processor
from tether.models.roles import OFF, POLICY, REFERENCE, VALUE, ModelRoles, Role
from tether.models.rounding import frozen_copy
from tether.models.tokenizer import TOKENIZER_FILES
from tether.types import Prompt

logger = logging.getLogger(__name__)

IN_MEMORY = "in memory"
MOST_RENAMED = 0.01
"""Share of a vocabulary that may be spelled differently in another tokenizer with the same ids."""
CAUSAL = "a causal language model (AutoModelForCausalLM.from_pretrained(path))"
CLASSIFIER = (
    "a sequence classifier with one label (AutoModelForSequenceClassification.from_pretrained(path, num_labels=1))"
)
CRITIC = (
    f"{CLASSIFIER}, or a module with base_model_prefix, a model of transformers under that name, and score, a module "
    "or method that makes one number of each of its hidden states"
)

MERGE = {
    "reward_model": "Merge its adapter first, reward_model.merge_and_unload(), or give the adapter's folder as a path",
    "value_model": "Merge its adapter first, value_model.merge_and_unload(), and all its weights train; a critic that "
    "trains an adapter is `value: {kind: adapter}` of a configuration file",
}
"""What to do with a classifier in PEFT's wrapper, by its argument."""


@dataclass(frozen=True)
class Models:
    """The models that ``PPOTrainer`` was given.

    ``check`` raises for unusable models; nothing is changed before ``roles``.
    """

    policy: Any
    reference: Any
    value: Any
    peft_config: Any
    policy_adapter: str
    """PEFT's name of the adapter that is trained, if the policy has adapters."""
    reference_adapter: str | None
    """PEFT's name of the reference adapter; None for the trained adapter as it was at the start."""

    @property
    def base(self) -> PreTrainedModel:
        """The policy without its PEFT wrapper."""
        return self.policy.get_base_model() if isinstance(self.policy, PeftModel) else self.policy

    @property
    def read(self) -> dict[str, PreTrainedModel]:
        """The models that read the policy's token ids, by argument name."""
        reference = {} if self.reference is None else {"ref_model": self.reference}
        return {"model": self.base, "value_model": self.value_trunk} | reference

    @property
    def value_trunk(self) -> PreTrainedModel:
        """What reads token ids for the critic: the critic itself, or the backbone of a module of the script's own."""
        return self.value if isinstance(self.value, PreTrainedModel) else backbone_of(self.value)

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic is a head of the script's own on the policy's layers."""
        return self.value_trunk is not self.value and self.value_trunk.base_model is self.base.base_model

    @property
    def is_adapted(self) -> bool:
        """Whether the policy trains an adapter."""
        return self.peft_config is not None or isinstance(self.policy, PeftModel)

    @property
    def lora(self) -> dict[str, Any] | None:
        """Settings of the trained adapter in the form of a run's configuration; None for full fine-tuning."""
        if not self.is_adapted:
            return None
        config = self.peft_config or self.policy.peft_config[self.policy_adapter]
        targets = config.target_modules
        return {
            "r": config.r,
            "alpha": config.lora_alpha,
            "dropout": config.lora_dropout,
            "target_modules": targets if isinstance(targets, str) else sorted(targets or ["PEFT's own choice"]),
        }

    def check(self, judges: list[PreTrainedModel]) -> None:
        """Raises for arguments of the wrong type, and for models that two roles cannot share.

        Args:
            judges: reward models in memory.

        Raises:
            ConfigError, ModelError: names the argument, what it got and what is accepted.
        """
        self._check_policy()
        self._check_reference()
        _check_critic(self.value)
        is_adapted = any(isinstance(each, BaseTunerLayer) for each in self.value.modules())
        if is_quantized(self.value_trunk) and not is_adapted:
            raise ConfigError(
                "value_model: has quantized weights, which a critic cannot train; load it without "
                "quantization_config, or give it an adapter that trains, get_peft_model(value_model, LoraConfig(...))"
            )
        if any(self.value is judge for judge in judges):
            raise ConfigError(
                "value_model: got the same object as reward_model. The critic trains, which would change the rewards: "
                "load the model twice"
            )
        if not any(parameter.requires_grad for parameter in self.value.parameters()):
            raise ConfigError("value_model: none of its parameters requires a gradient, so it cannot learn")
        self._check_types()
        for name, model in {"model": self.base, "ref_model": self.reference, "value_model": self.value_trunk}.items():
            _check_placed(model, name)
        self._check_apart(judges)

    def _check_policy(self) -> None:
        if not isinstance(self.policy, PreTrainedModel | PeftModel) or not _is_causal(self.base):
            raise ConfigError(f"model: got {type(self.policy).__name__}, wanted {CAUSAL} or a PEFT model of one")
        if self.peft_config is not None:
            if isinstance(self.policy, PeftModel):
                raise ConfigError(
                    "peft_config: the model is a PEFT model already; leave peft_config out to train its adapter, or "
                    "merge it first (merge_and_unload)"
                )
            if not isinstance(self.peft_config, PeftConfig):
                raise ConfigError(f"peft_config: got {type(self.peft_config).__name__}, wanted a peft.LoraConfig")
            _check_lora(self.peft_config, "peft_config")
            if self.peft_config.target_modules is not None:
                check_linear(self.policy, self.peft_config.target_modules, "peft_config.target_modules")
        elif isinstance(self.policy, PeftModel):
            self._check_names()
            _check_lora(self.policy.peft_config[self.policy_adapter], "model")
        elif not any(parameter.requires_grad for parameter in self.policy.parameters()):
            raise ConfigError("model: none of its parameters requires a gradient, so nothing would train")
        if is_quantized(self.base) and not self.is_adapted:
            raise ConfigError(
                "model: has quantized weights, which cannot be trained themselves; give a peft_config, whose adapter "
                "then trains"
            )
        if self.reference_adapter is not None and not isinstance(self.policy, PeftModel):
            raise ConfigError("PPOConfig.ref_adapter_name: the model is not a PEFT model, so it has no named adapters")

    def _check_apart(self, judges: Sequence[PreTrainedModel]) -> None:
        """Raises ``ConfigError`` if another model holds weights of the policy or the critic, and so changes as they
        train."""
        frozen = [("ref_model", self.reference)] if self.reference is not None else []
        frozen += [("reward_model", judge) for judge in judges]
        critic = [] if self.shares_trunk else [("value_model", self.value)]
        for trains, model, others in (("model", self.policy, critic + frozen), ("value_model", self.value, frozen)):
            places = {parameter.data_ptr() for parameter in model.parameters()} - {0}
            for name, other in others:
                shared = [key for key, parameter in other.named_parameters() if parameter.data_ptr() in places]
                if shared:
                    raise ConfigError(
                        f"{name}: shares weights with {trains}, {some_of(shared)}, and would change as that trains: "
                        "load it on its own, or pass copy.deepcopy of it"
                    )

    def _check_types(self) -> None:
        """Raises ``ConfigError`` if trained weights are float16; warns if they are bfloat16."""
        for name, parameters in {"model": self._to_train(), "value_model": _trainable(self.value)}.items():
            types = {parameter.dtype for parameter in parameters.values()}
            told = "load it with dtype=torch.float32; {}=True computes in {} over float32 weights"
            if torch.float16 in types:
                raise ConfigError(
                    f"{name}: the weights that train are torch.float16, in which small steps are lost and others "
                    f"overflow: {told.format('fp16', 'float16')}"
                )
            if torch.bfloat16 in types:
                logger.warning(
                    "%s: the weights that train are torch.bfloat16, in which most steps of a small learning rate are "
                    "rounded away: %s", name, told.format("bf16", "bfloat16")
                )  # fmt: skip

    def check_passes(self, autocast_dtype: torch.dtype | None) -> None:
        """Raises ``ConfigError`` if a model has weights of types that its layers cannot multiply with each other.

        Args:
            autocast_dtype: of the run's forward passes, None without autocast.
        """
        is_linear = isinstance(_score(self.value), nn.Linear)
        own = None if is_linear else _critic_head(self.value, self.value_trunk)
        for name, model in self.read.items():
            trunk = model.base_model if name == "value_model" else model
            head = own if name == "value_model" else None
            check_pass(trunk, name, autocast_dtype, head)

    def _to_train(self) -> dict[str, nn.Parameter]:
        """The policy's trainable parameters; those of ``peft_config`` are created later, in float32."""
        if isinstance(self.policy, PeftModel):
            return adapter_parameters(self.policy, self.policy_adapter)
        return {} if self.peft_config is not None else _trainable(self.policy)

    def _check_names(self) -> None:
        names = {"model_adapter_name": self.policy_adapter, "ref_adapter_name": self.reference_adapter}
        for key, name in names.items():
            if name is not None and name not in self.policy.peft_config:
                has = ", ".join(self.policy.peft_config)
                raise ConfigError(f"PPOConfig.{key}: the model has no adapter {name}; it has {has}")
        if self.reference_adapter == self.policy_adapter:
            raise ConfigError(
                f"PPOConfig.ref_adapter_name: got {self.reference_adapter}, the adapter that trains, whose KL to "
                "itself is always 0; wanted another one, or leave it out"
            )

    def _check_reference(self) -> None:
        if self.reference is None:
            return
        if not isinstance(self.reference, PreTrainedModel) or not _is_causal(self.reference):
            raise ConfigError(f"ref_model: got {type(self.reference).__name__}, wanted {CAUSAL}, or None")
        if self.reference is self.base or self.reference is self.policy:
            raise ConfigError(
                "ref_model: got the same object as model. Leave it None: the start policy is then the reference"
            )
        own, other = _dtype(self.base), _dtype(self.reference)
        if own != other:
            raise ConfigError(
                f"ref_model: its weights are {other}, the policy's {own}, and the rounding would count as KL. "
                "Load both in one dtype"
            )

    def roles(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, device: torch.device
    ) -> ModelRoles:
        """The models as roles, in place; a fresh adapter depends only on ``train.seed``.

        Raises:
            ConfigError, ModelError: an adapter does not fit, or an end token has no embedding.
        """
        check_token_ids(self.base, tokenizer)
        head, autocast_dtype = _critic_head(self.value, self.value_trunk), half_dtype(config.train, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            adapted = self._adapted()
            reference = [self._reference(autocast_dtype)] if config.ppo.kl_coef > 0 else []
        source, processor = name_of(self.base), None
        if adapted is None:
            if source != IN_MEMORY:  # an adapter's base has its own
                processor = read_processor(source, self.base.config)
            trained = _trainable(self.policy)
            policy = Role(POLICY, self.policy, source, "own weights", trained=trained)
        else:
            adapter = self.policy_adapter
            adapted.set_adapter(adapter)
            trained = adapter_parameters(adapted, adapter)
            policy = Role(POLICY, self.base, source, "adapter on the base", adapter, trained=trained)
        models = ModelRoles(
            [policy, *reference, self._critic(head, policy)],
            adapted=adapted,
            base_source=absolute_source(source),
            tokenizer=tokenizer,
            device=device,
            autocast_dtype=autocast_dtype,
            detach_value=False,
            processor=processor,
        )
        return finished(models, config)

    def _critic(self, head: nn.Module, policy: Role) -> Role:
        """The value model as it is; a linear head then computes in its own dtype, also under autocast."""
        trunk, source = self.value_trunk, name_of(self.value_trunk)
        if self.shares_trunk:
            return Role(VALUE, policy.model, source, "head on the policy", policy.adapter, head, _trainable(head))
        used = {id(parameter) for module in (trunk, head) for parameter in module.parameters()}
        trained = {name: parameter for name, parameter in _trainable(self.value).items() if id(parameter) in used}
        return Role(VALUE, trunk, source, "own weights", head=head, trained=trained)

    def _adapted(self) -> PeftModel | None:
        if isinstance(self.policy, PeftModel):
            return self.policy
        if self.peft_config is None:
            return None
        settings = changed_config(
            self.peft_config,
            task_type="CAUSAL_LM",
            base_model_name_or_path=absolute_source(name_of(self.policy)),
            inference_mode=False,
        )
        try:
            return with_adapter(self.policy, settings)
        except ValueError as error:
            raise ConfigError(f"peft_config: {error}") from error

    def _reference(self, autocast_dtype: torch.dtype | None) -> Role:
        source = name_of(self.base)
        if self.reference is not None:
            return Role(REFERENCE, self.reference, name_of(self.reference), "own weights")
        if self.reference_adapter is not None:
            return Role(REFERENCE, self.base, source, "frozen adapter on the base", self.reference_adapter)
        if isinstance(self.policy, PeftModel) and _is_changed(self.policy, self.policy_adapter):
            name = _copied_adapter(self.policy, self.policy_adapter)
            return Role(REFERENCE, self.base, source, "frozen adapter on the base", name)
        if self.is_adapted:
            return Role(REFERENCE, self.base, source, "the base, adapters off", OFF)
        copied = frozen_copy(self.policy, autocast_dtype)
        return Role(REFERENCE, copied, source, "frozen copy", copies_policy=True)


def name_of(model: PreTrainedModel) -> str:
    """Where the model was loaded from."""
    return model.name_or_path or IN_MEMORY


def inside(model: Any) -> Any:
    """The model in PEFT's wrapper, if its adapters are parts of its layers and so stay in it; else ``model``."""
    return model.get_base_model() if isinstance(model, PeftModel) and isinstance(model.base_model, BaseTuner) else model


def backbone_of(module: Any) -> Any:
    """The backbone of a module of the script's own that has what TRL's trainer asks of a judge or critic:
    ``base_model_prefix``, the backbone under that name, and ``score``; None of anything else."""
    prefix = getattr(module, "base_model_prefix", None)
    if isinstance(module, PreTrainedModel | PeftModel | type) or not isinstance(prefix, str):
        return None
    backbone = getattr(module, prefix, None)
    return backbone if callable(backbone) and callable(getattr(module, "score", None)) else None


class MethodHead(nn.Module):
    """The ``score`` of a script's own critic that is a method.

    Args:
        score: hidden states [..., D] → [..., 1] or [...].
        parts: the modules that it computes with, by name.
    """

    def __init__(self, score: Callable[[Tensor], Tensor], parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self._score = [score]  # in a list, so that a callable module is not registered twice

    def forward(self, hidden: Tensor) -> Tensor:
        """The value of each hidden state, [..., 1]."""
        values = self._score[0](hidden)
        return values.unsqueeze(-1) if values.shape == hidden.shape[:-1] else values


def _critic_head(model: nn.Module, trunk: PreTrainedModel) -> nn.Module:
    """The head of a critic, in eval mode, with the critic's own parameters."""
    if isinstance(_score(model), nn.Module):
        return with_scalar_head(model).eval()
    below = set(map(id, trunk.modules()))
    own = {name: part for name, part in model.named_children() if below.isdisjoint(map(id, part.modules()))}
    return MethodHead(model.score, own).eval()


def _check_critic(model: Any) -> None:
    """Raises ``ConfigError`` if ``model`` cannot give a value for each token."""
    backbone = backbone_of(model)
    if backbone is None or not isinstance(model, nn.Module):
        check_classifier(model, "value_model", CRITIC)
        return
    if not isinstance(backbone, PreTrainedModel):
        kind = type(backbone).__name__
        raise ConfigError(f"value_model: got {type(model).__name__} with a {kind} as backbone, wanted {CRITIC}")
    _check_head(model, backbone, "value_model", CRITIC)


def check_classifier(model: Any, name: str, wanted: str) -> None:
    """Raises ``ConfigError`` if ``model`` is not a decoder with a scalar head called ``score``."""
    if isinstance(model, PeftModel):
        raise ConfigError(
            f"{name}: got {type(model).__name__} with virtual tokens or the like, which are no part of its layers as "
            f"LoRA's weights are; wanted {wanted}"
        )
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{name}: got {type(model).__name__}, wanted {wanted}")
    _check_head(model, model, name, wanted)


def _check_head(model: nn.Module, trunk: PreTrainedModel, name: str, wanted: str) -> None:
    """Raises ``ConfigError`` if the ``score`` of a model is no module that makes one number of each hidden state of the
    ``trunk``."""
    score, kind = _score(model), type(model).__name__
    if isinstance(score, nn.Linear):
        if score.out_features != 1:
            raise ConfigError(f"{name}: got a classifier with {score.out_features} labels, wanted {wanted}")
        return
    if trunk is not model and callable(score) and not isinstance(score, nn.Module):
        if loose := [each for each, _ in model.named_parameters(recurse=False)]:
            raise ConfigError(f"{name}: {', '.join(loose)} of {kind} are in none of its modules, wanted {wanted}")
        score = _critic_head(model, trunk)
    if not isinstance(score, nn.Module) or isinstance(score, BaseTunerLayer | ModulesToSaveWrapper):
        merge = f". {MERGE[name]}" if isinstance(score, nn.Module) else ""
        raise ConfigError(f"{name}: got {kind} without a module `score`, wanted {wanted}{merge}")
    weight = next(score.parameters(), torch.empty(0))
    states = torch.zeros(2, trunk.config.get_text_config().hidden_size, dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad():
            got = f"values of shape {list(score(states).shape)}"
            is_scalar = got.endswith("[2, 1]")
    except Exception as error:  # whatever a module of the script's own raises
        got, is_scalar = f"{type(error).__name__}: {error}", False
    if not is_scalar:
        raise ConfigError(
            f"{name}: the score of {kind} gives {got} for hidden states of shape {list(states.shape)}; wanted one "
            "number for each of them, [2, 1]"
        )


@torch.no_grad()
def check_pass(
    model: PreTrainedModel, name: str, autocast_dtype: torch.dtype | None, head: nn.Module | None = None
) -> None:
    """Raises ``ConfigError`` if a model with weights of several types cannot read a few tokens.

    Args:
        head: what reads its hidden states, if that has a type of its own.
    """
    types = {x.dtype for part in (model, head) if part is not None for x in part.parameters() if x.is_floating_point()}
    if len(types) < 2:
        return
    kind, is_on = model.device.type, autocast_dtype is not None
    try:
        with torch.autocast(kind, autocast_dtype, enabled=is_on):
            output = model(input_ids=few_tokens(model), use_cache=False)
            if head is not None:
                head(output.last_hidden_state)
    except RuntimeError as error:
        raise ConfigError(
            f"{name}: has weights of the types {', '.join(sorted(map(str, types)))}, which its layers cannot compute "
            f"with ({error}); wanted one type: load it with dtype=torch.float32"
        ) from error


def scalar_head(model: nn.Module) -> nn.Module:
    """A head that shares the parameters of the classifier's own; a ``score`` that is not linear as it is."""
    score = _score(model)
    if isinstance(score, ScalarHead) or not isinstance(score, nn.Linear):
        return score
    head = ScalarHead(score.in_features, bias=score.bias is not None)
    head.weight, head.bias = score.weight, score.bias
    return head


def with_scalar_head(model: nn.Module) -> nn.Module:
    """Puts a ``scalar_head`` in the place of the classifier's own, and returns it."""
    head = scalar_head(model)
    if isinstance(model.score, ModulesToSaveWrapper):
        model.score.modules_to_save[model.score.active_adapters[0]] = head
    else:
        model.score = head
    return head


def _score(model: nn.Module) -> Any:
    """The classifier's head; of one that PEFT trains and saves with an adapter, that adapter's."""
    score = getattr(model, "score", None)
    if isinstance(score, ModulesToSaveWrapper) and score.active_adapters:
        return score.modules_to_save[score.active_adapters[0]]
    return score


def check_vocabularies(models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ``ModelError`` if a model lacks embeddings of tokens that the policy can write, or reads them as other
    tokens.

    Args:
        models: models by argument name, the policy as ``model``. The pad token needs no embedding: pads never reach a
            model.
    """
    size, pads = num_rows(models["model"]), {tokenizer.pad_token_id}
    highest = max(token for token in tokenizer.get_vocab().values() if token not in pads and token < size)
    others = {name: model for name, model in models.items() if name != "model"}
    sizes = {name: num_rows(model) for name, model in others.items()}
    _check_rows(sizes, highest, tokenizer, "the tokenizer writes")
    for name, model in others.items():
        own = _saved_tokenizer(model.name_or_path)
        if own is not None and (told := _read_otherwise(own, tokenizer)) is not None:
            way_out = "give its path, which then reads text" if name.startswith("reward_model") else "load another"
            raise ModelError(
                f"{name}: the tokenizer in {model.name_or_path} has {told}. Models in memory read the policy's token "
                f"ids, which mean other words to this one; wanted a model with the policy's vocabulary: {way_out}"
            )


def check_tokens(sizes: Mapping[str, int], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
    """Raises ``ModelError`` if a model lacks the embedding of a token in a prompt.

    Args:
        sizes: ``num_rows`` of each model, by argument name.
    """
    highest, row = max((max(prompt.token_ids), prompt.row) for prompt in prompts)
    _check_rows(sizes, highest, tokenizer, f"row {row} of the prompts holds")


def _check_rows(sizes: Mapping[str, int], token: int, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    for name, size in sizes.items():
        if token >= size:
            raise ModelError(
                f"{name}: knows {size} tokens, but {what} token {token}, "
                f"{tokenizer.convert_ids_to_tokens(token)!r}. All models read the policy's token ids: load models "
                "with one vocabulary, or give the path of a reward model, which then reads text"
            )


def _saved_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved with a model, if there is one that can be loaded without the network."""
    try:
        with model_errors(source):
            if Path(source).exists():
                is_there = any((Path(source) / name).is_file() for name in TOKENIZER_FILES)
            else:
                is_there = any(isinstance(try_to_load_from_cache(source, name), str) for name in TOKENIZER_FILES)
            if not is_there:
                return None
            return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except ModelError:
        return None


def _read_otherwise(own: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A word of one tokenizer whose id means another word in the other, if there are many; None if they share ids.

    Added tokens do not count, nor do a few other differences: pad tokens get added, and reserved tokens renamed.
    """
    mine, theirs = _words(own), _words(tokenizer)
    common = mine.keys() & theirs.keys()
    differing = [token for token in common if mine[token] != theirs[token]]
    if len(differing) <= MOST_RENAMED * len(common):
        return None
    token = min(differing)
    return f"{mine[token]!r} as token {token}, processing_class {theirs[token]!r}"


def _words(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens of the vocabulary by id, without added tokens."""
    added = tokenizer.get_added_vocab()
    return {token: word for word, token in tokenizer.get_vocab().items() if word not in added}


def check_positions(models: Mapping[str, PreTrainedModel], longest: int, response_length: int) -> None:
    """Raises ``ConfigError`` if a query with its answer exceeds a model's positions.

    Args:
        models: models by argument name.
        longest: number of tokens in the longest query.
    """
    for name, model in models.items():
        words = {"key": "PPOConfig.response_length", "way_out": "lower it, or drop long prompts", "model": name}
        fit.check_positions(model.config, longest, response_length, **words)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _is_changed(model: PeftModel, adapter: str) -> bool:
    """Whether the adapter changes the model's outputs, which a fresh one does not."""
    if getattr(model.peft_config[adapter], "modules_to_save", None):
        return True
    out = [p for name, p in adapter_parameters(model, adapter).items() if "lora_B" in name or "embedding_B" in name]
    return any(bool(parameter.detach().any()) for parameter in out)


def _copied_adapter(model: PeftModel, adapter: str) -> str:
    """Adds a frozen copy of an adapter next to it; returns its name."""
    name = REFERENCE
    while name in model.peft_config:
        name += "_"
    model.add_adapter(name, changed_config(model.peft_config[adapter], inference_mode=False))
    own, copied = (adapter_parameters(model, each) for each in (adapter, name))
    for parameter, target in zip(own.values(), copied.values(), strict=True):
        target.data = parameter.detach().clone()
        target.requires_grad_(False)
    return name


def _is_causal(model: Any) -> bool:
    is_decoder = isinstance(model, PreTrainedModel) and not model.config.is_encoder_decoder
    return is_decoder and model.can_generate() and model.get_output_embeddings() is not None


def _dtype(model: PreTrainedModel) -> torch.dtype:
    return model.get_output_embeddings().weight.dtype


def _check_lora(config: PeftConfig, name: str) -> None:
    """Raises for an adapter whose base other roles cannot share, or that is not for a language model."""
    check_shareable(Adapter(name, config, {}, {}))
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ConfigError(f"{name}: got an adapter for {config.task_type}, wanted one for CAUSAL_LM")


def _check_placed(model: PreTrainedModel | None, name: str) -> None:
    places = set(getattr(model, "hf_device_map", {}).values())
    if len(places) > 1:
        raise ConfigError(
            f"{name}: its layers are spread over {', '.join(map(str, places))}; wanted a model on one device: load it "
            "without device_map"
        )
    if model is not None and any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(f"{name}: got weights on the meta device, which hold no numbers; load it by from_pretrained")
