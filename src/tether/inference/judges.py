"""Reward sources outside of a run, loaded from their own file, for ``tether score`` and ``tether serve-reward``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.config.chat import present, with_now
from tether.config.model import LoraConfig
from tether.config.rewards import AdapterReward, OwnModelReward, measured_norms, sources_of
from tether.config.schema import RunConfig
from tether.config.source import QueryConfig, SourceConfig
from tether.data.answers import answer_ids, closing_token
from tether.data.queries import QueryFormat, encoded_prompts
from tether.errors import ConfigError, DataError
from tether.machine.distributed import Dist
from tether.models.build import build_roles
from tether.models.chat import check_template, check_template_kwargs, templated
from tether.models.device import half_dtype
from tether.models.paths import check_model_path
from tether.models.roles import ModelRoles
from tether.models.stop_strings import continued
from tether.models.tokenizer import end_token_ids, load_generation_config, load_tokenizer
from tether.report.text import prompt_text
from tether.rewards.build import build_rewards, check_rewards
from tether.rewards.server import Asked, RewardServer
from tether.rewards.tokens import steps
from tether.train.display import Display
from tether.train.interrupt import StopRequest
from tether.types import Message, RewardBatch, RewardSource

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class PolicyReader:
    """Encodes prompts and answers as a policy would, and builds batches of them for reward sources."""

    tokenizer: PreTrainedTokenizerBase | None
    """The policy's, or a reward model's in its place; None if no source has one."""
    closing_id: int | None
    """The token that ends an answer; None if there is none."""
    query: QueryConfig
    """How prompts become queries."""
    is_stand_in: bool
    """Whether the tokenizer is a reward model's, because no policy is named."""

    @property
    def is_chat(self) -> bool:
        """Whether prompts are rendered with a chat template."""
        return self.tokenizer is not None and self._form.is_chat

    @property
    def _form(self) -> QueryFormat:
        return QueryFormat(self.tokenizer, **self.query.chat)

    def batch(
        self,
        prompts: Sequence[str | list[Message] | None],
        responses: Sequence[str],
        columns: Mapping[str, list[Any]],
        places: Sequence[str],
    ) -> RewardBatch:
        """Builds a batch of answers as a run would pass them to its sources, each with an end token.

        Args:
            prompts: as in the dataset; None if a response is a complete text.
            columns: the dataset's other columns, one entry per answer.
            places: the row of each answer, for messages.

        Raises:
            ConfigError, DataError: a prompt cannot be turned into a query; names the row.
        """
        if self.tokenizer is None:
            texts, query_ids = [prompt_text(prompt) for prompt in prompts], [[] for _ in prompts]
            response_ids = [[] for _ in prompts]
            conversations = [prompt if isinstance(prompt, list) else None for prompt in prompts]
        else:
            rows = [{name: values[i] for name, values in columns.items()} for i in range(len(places))]
            try:
                queries = encoded_prompts(prompts, rows, self._form, places)
            except DataError as error:
                if self.is_stand_in:
                    error.add_note("no policy is named, so a judge's tokenizer is used: set model.path to the policy")
                raise
            texts, query_ids = [query.text for query in queries], [query.ids for query in queries]
            conversations = [query.conversation for query in queries]
            response_ids = self._answer_ids(prompts, responses)
        return RewardBatch(
            prompts=["" if prompt is None else prompt for prompt in prompts],
            queries=texts,
            responses=list(responses),
            query_ids=query_ids,
            response_ids=response_ids,
            conversations=conversations,
            columns=columns,
            decode=None if self.tokenizer is None else partial(continued, tokenizer=self.tokenizer),
        )

    def _answer_ids(
        self, prompts: Sequence[str | list[Message] | None], responses: Sequence[str]
    ) -> list[list[int]]:
        if self.closing_id is None:
            return self.tokenizer(list(responses), add_special_tokens=False)["input_ids"]
        return answer_ids(responses, prompts, self._form, self.closing_id)


@dataclass(frozen=True)
class Judges:
    """Reward sources, and a reader that builds batches for them."""

    rewards: RewardSource
    """The weighted sum of the sources."""
    reader: PolicyReader
    """Builds the batches."""

    def score(self, request: Asked) -> Mapping[str, Any]:
        """Scores for a request to the reward server, in the format of its protocol."""
        places = [f"entry {i}" for i in range(len(request.prompts))]
        batch = self.reader.batch(request.prompts, request.responses, request.columns, places)
        output = self.rewards.score(batch)
        return {"scores": steps(output, batch), "components": dict(output.components)}


def check_sources(config: SourceConfig) -> None:
    """Raises for every mistake that can be found without loading a model or reading a dataset."""
    if keys := measured_norms(config.rewards):
        raise ConfigError(
            f"{keys[0]}.norm auto is measured on the answers of a run's start policy, and there is none here; set it "
            "to [mean, std], as in score_norm.json of a run, or leave it out"
        )
    if config.model is not None:
        check_model_path(config.model.path, "model.path", revision=config.model.revision, takes_gguf=True)
    check_template(config.data.chat_template)
    check_rewards(config.rewards)


def load_reader(config: SourceConfig) -> PolicyReader:
    """Loads the policy's tokenizer, or a reward model's in its place; loads no model.

    Raises:
        ConfigError, ModelError: it cannot be loaded.
    """
    own = next((reward for _, reward in sources_of(config.rewards) if isinstance(reward, OwnModelReward)), None)
    model, query = config.model or own, {"query": config.data, "is_stand_in": config.model is None}
    if model is None:
        return PolicyReader(None, None, **query)
    tokenizer = load_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    tokenizer = templated(tokenizer, config.data.chat_template)
    check_template_kwargs(tokenizer, config.data.chat_template_kwargs)
    if config.model is None and tokenizer.eos_token_id is None:  # an encoder's, which does not read policy token ids
        return PolicyReader(tokenizer, None, **query)
    generation = load_generation_config(model.path, revision=model.revision)
    closing_id = closing_token(tokenizer, end_token_ids(tokenizer, generation))
    return PolicyReader(tokenizer, closing_id, **query)


def load_judges(config: SourceConfig, reader: PolicyReader) -> Judges:
    """Loads the sources that a file describes.

    Args:
        reader: from ``load_reader``.

    Raises:
        ConfigError, ModelError: a source cannot be loaded.
    """
    device, tokenizer = Dist().device, reader.tokenizer
    roles = None
    if any(isinstance(reward, AdapterReward) for _, reward in sources_of(config.rewards)):
        roles = _roles(config, tokenizer, str(device))
    rewards = build_rewards(
        config.rewards,
        config.reward_names,
        roles=roles,
        tokenizer=tokenizer,
        device=device,
        now=config.data.chat_template_now,
    )
    return Judges(rewards, reader)


def serve_rewards(config: SourceConfig, *, host: str, port: int, display: Display) -> str:
    """Serves the sources until a signal arrives, and returns its name. The current request is still answered.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Raises:
        ConfigError, ModelError: a source cannot be loaded, or the address is in use.
    """
    config = with_now(config, present())
    check_sources(config)
    with RewardServer(host, port) as server:  # before models are loaded, to fail early if the address is in use
        display.phase("loading models", 0, 1)
        judges = load_judges(config, load_reader(config))
        with StopRequest() as stop:
            display.close()
            display.message(f"serving {', '.join(config.reward_names)} at {server.url}; Ctrl-C stops it")
            if host not in LOOPBACK:
                display.message("anyone who reaches this address can request scores: there is no authentication")
            server.run(judges.score, lambda: stop.reason is not None)
    return stop.reason


def _roles(config: SourceConfig, tokenizer: PreTrainedTokenizerBase, device: str) -> ModelRoles:
    """The policy's base for reward adapters, without anything that only training needs."""
    run = RunConfig(
        model=config.model.model_copy(update={"lora": config.model.lora or LoraConfig()}),
        value={"kind": "head"},
        rewards=config.rewards,
        data={"prompts": ""},
        ppo={"kl_coef": 0.0},
        train={"max_steps": 1},
        output_dir=".",
    ).resolved(bf16=False)
    return build_roles(run, tokenizer, device=device, autocast_dtype=half_dtype(config, device))
