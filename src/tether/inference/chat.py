"""A conversation with a trained model, side by side with the model that its training started from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tether.config.schema import RunConfig
from tether.data.queries import QueryFormat, encoded_queries, uses_template
from tether.errors import ConfigError
from tether.generation.hf import HFGenerator
from tether.inference.options import check_options
from tether.inference.saved import SavedPolicy, chat_keys, load_saved_policy, policy_config
from tether.inference.streaming import Streamed
from tether.models.chat import templated
from tether.models.paths import check_model_path
from tether.models.stop_strings import answer_text
from tether.models.tokenizer import load_tokenizer
from tether.types import Message, Request, noise_key


@dataclass
class Speaker:
    """One side of the conversation."""

    name: str
    """The source of the model."""
    policy: SavedPolicy
    tokenizer: PreTrainedTokenizerBase
    turns: list[Message] = field(default_factory=list)
    """The conversation so far."""
    generator: HFGenerator = field(init=False)
    """What writes its answers; it finds out once how the model decodes."""

    def __post_init__(self) -> None:
        model = self.policy.model
        self.generator = HFGenerator(
            partial(nullcontext, model), batch_size=1, device=model.device, limits="--response_length", smaller=""
        )


Tell = Callable[[Speaker, str], None]
"""Called with a side of the conversation and the next bit of its answer."""


@dataclass
class Chat:
    """A conversation with one or two models."""

    speakers: list[Speaker]
    keys: Mapping[str, Any]
    """Settings for rendering conversations, as in the run."""
    system: str | None
    seed: int
    asked: int = 0
    """Number of questions so far; each has its own noise, the same for both sides."""

    @torch.no_grad()
    def say(self, text: str, tell: Tell = lambda speaker, text: None) -> list[str]:
        """Returns each side's answer to ``text``, given its conversation so far.

        Args:
            tell: called with the answers as they are written, one side after the other.

        Raises:
            ConfigError: the conversation is longer than a model can read; it is not changed.
        """
        key = noise_key(self.seed, "chat", self.asked, 0)
        answers = [self._answer(speaker, text, key, partial(tell, speaker)) for speaker in self.speakers]
        for speaker, answer in zip(self.speakers, answers, strict=True):
            speaker.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.asked += 1
        return answers

    def forget(self) -> None:
        """Starts a new conversation."""
        for speaker in self.speakers:
            speaker.turns.clear()

    def instruct(self, system: str | None) -> None:
        """Starts a new conversation with another system prompt.

        Raises:
            ConfigError: a model has no chat template to put it in; nothing is changed.
        """
        for speaker in self.speakers:
            _check_system(system, speaker.name, speaker.tokenizer, self.keys["chat_template"])
        self.system = system
        self.forget()

    def _answer(self, speaker: Speaker, text: str, key: int, tell: Callable[[str], None]) -> str:
        form = QueryFormat(speaker.tokenizer, **{**self.keys, "system_prompt": self.system})
        asked = [*speaker.turns, {"role": "user", "content": text}]
        source = form.conversation(asked) if form.is_chat else text
        _, (query,) = encoded_queries([source], form, ["what you typed"], [form.chat_template_kwargs])
        before, sampling = () if form.is_chat else query, speaker.policy.sampling
        streamed = Streamed(speaker.tokenizer, sampling, tell)
        heard = replace(sampling, text_ends=streamed)
        ((_, answer),) = speaker.generator.generate([Request(query, key, before)], heard)
        text = answer_text(answer.token_ids, speaker.tokenizer, sampling, before).strip()
        streamed.finish(text)
        return text


def open_chat(
    model: str,
    *,
    beside: str | None,
    alone: bool,
    system: str | None,
    response_length: int | None,
    temperature: float | None,
    seed: int,
    trust_remote_code: bool = False,
) -> Chat:
    """Loads a model, and the one that its run started from.

    Args:
        model: a run's output folder, a checkpoint in it, a model or adapter folder, or a hub id.
        beside: another model to compare with instead.
        alone: whether to load no model for comparison.
        system: system prompt; the run's if None, none if empty.
        response_length, temperature: the run's, or 256 and 1, if None.
        trust_remote_code: whether to run code that comes with the models, regardless of a configuration beside them.

    Raises:
        ConfigError, ModelError: a model does not exist, an option is out of range, or there is a system prompt without
            a chat template to put it in.
    """
    check_options(response_length=response_length, temperature=temperature)
    config = policy_config(Path(model))
    run = config if isinstance(config, RunConfig) else None
    code = {"trust_remote_code": trust_remote_code}
    models = [_Source("RUN_OR_MODEL", model, code)]
    if beside is not None and not alone:
        models.append(_Source("--beside", beside, code))
    elif run is not None and not alone:
        key = f"model.path of the run in {model} (--alone skips it, --beside names another)"
        models.append(_Source(key, run.model.path, code | {"revision": run.model.revision}))
    for source in models:
        check_model_path(source.path, source.key, revision=source.options.get("revision"), takes_gguf=True)
    keys = chat_keys(config)
    tokenizers = [load_tokenizer(source.path, **source.options) for source in models]
    # the run's tokenizer already has its template, which may be from a file that is not available here
    template = tokenizers[0].chat_template
    tokenizers[1:] = [templated(other, keys["chat_template"], template) for other in tokenizers[1:]]
    asked = keys["system_prompt"] if system is None else system or None
    for source, tokenizer in zip(models, tokenizers, strict=True):
        _check_system(asked, source.path, tokenizer, keys["chat_template"])
    speakers = []
    for source, tokenizer in zip(models, tokenizers, strict=True):
        policy = load_saved_policy(
            source.path, tokenizer, run, response_length=response_length, temperature=temperature, **source.options
        )
        speakers.append(Speaker(source.path, policy, tokenizer))
    return Chat(speakers, keys, asked, seed)


def _check_system(system: str | None, name: str, tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    """Raises ``ConfigError`` if a system prompt would be lost."""
    if system is None or uses_template(tokenizer, chat_template):
        return
    why = "has no chat template" if tokenizer.chat_template is None else "is asked without its chat template"
    raise ConfigError(f"--system: {name} {why}, so that it would never read a system prompt: --system '' leaves it out")


@dataclass(frozen=True)
class _Source:
    """The source of a model in a conversation."""

    key: str
    """The argument or key that named it, for messages."""
    path: str
    options: Mapping[str, Any]
    """Options for loading."""
