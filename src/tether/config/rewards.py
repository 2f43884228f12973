"""Reward sources as a run names them, one section per type; the judges of answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from tether.config.base import Quantization, Section


def _checked_url(url: str) -> str:
    """The address, if requests can be sent there and it holds no password, which messages would show."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"got an invalid address ({error}); wanted http://HOST:PORT/PATH") from error
    if "@" in parts.netloc:
        raise ValueError(
            "the address contains a user or password; put the key into an environment variable and name that in "
            "api_key_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"[\s#]", url):
        raise ValueError(f"got {url!r}, wanted an address that begins with http:// or https://")
    return url


Url = Annotated[str, AfterValidator(_checked_url)]


class _Reward(Section):
    weight: float = 1.0
    """Weight of this source in the sum."""
    norm: Literal["auto"] | Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Normalization with fixed numbers, ``[mean, std]``: subtract mean, divide by std. ``auto``: use the mean and
    standard deviation of the source's own scores of the start policy's answers, measured once before the first update
    (``ppo.score_norm_samples`` answers). Default: no normalization."""
    clip: PositiveFloat | Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Clips the source's scores, after ``norm`` and before ``weight``: a number c to within ±c, a list to ``[low,
    high]``. The logged score of a source is the one before all three. Default: no clipping."""
    name: str | None = None
    """Name in metrics and samples, without ``/``; must be unique."""

    @field_validator("name")
    @classmethod
    def _has_no_parts(cls, name: str | None) -> str | None:
        if name is not None and (not name.strip() or "/" in name):
            raise ValueError(f"got {name!r}, wanted a name without /, which separates a source from its components")
        return name

    @field_validator("norm")
    @classmethod
    def _has_spread(cls, norm: str | list[float] | None) -> str | list[float] | None:
        if isinstance(norm, list) and norm[1] <= 0:
            raise ValueError(f"got a standard deviation of {norm[1]:g}, wanted [mean, std] with std above 0")
        return norm

    @field_validator("clip")
    @classmethod
    def _leaves_room(cls, clip: float | list[float] | None) -> float | list[float] | None:
        if isinstance(clip, list) and clip[0] >= clip[1]:
            raise ValueError(f"got {clip[0]:g} to {clip[1]:g}, wanted the lower number first")
        return clip

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Lowest and highest score that counts, None without a clip."""
        if isinstance(self.clip, list):
            return self.clip[0], self.clip[1]
        return None if self.clip is None else (-self.clip, self.clip)


class OwnModelReward(_Reward):
    """What all sources have that are a model of their own."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights; ``auto``: as saved."""
    batch_size: PositiveInt = 16
    """Answers scored in one forward pass."""
    max_length: PositiveInt | None = None
    """Maximum length of prompt plus answer in the reward model's tokens. A longer text is an error unless ``missing``
    is set. Default: the model's own limit."""
    missing: float | None = None
    """Score of an answer that the model cannot read: with its prompt it is longer than ``max_length``, or it is an
    empty text that the tokenizer cannot represent. Default: both are errors."""
    input_format: Literal["auto", "chat", "joined", "pair", "response"] = "auto"
    """What the model reads. ``auto``: the policy's token ids if the tokenizers are the same; otherwise conversations in
    the model's own chat template, and plain text followed by the answer. ``chat``: always the whole conversation as
    text in the model's own chat template, closed as the template closes it; plain text becomes the user's turn.
    ``joined``: the messages of the conversation and the answer, separated by blank lines. ``pair``: prompt and answer
    as the tokenizer combines two texts (``[CLS] prompt [SEP] answer [SEP]``). ``response``: the answer alone. If the
    tokenizer has no chat template, conversations need one of the last three. docs/rewards.md says which to choose."""
    special_tokens: bool = False
    """Treat the model's special tokens as control tokens if they occur in the text of a prompt or an answer. If false,
    they are plain characters, so that no answer can end its own turn. No effect if the model reads the policy's token
    ids."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    quantization: Quantization | None = None
    """Store the linear layers, except the head, in 4 or 8 bits, as ``model.quantization`` does. All other weights have
    type ``dtype``. Needs ``pip install 'tether[quant]'``."""
    offload: bool | None = None
    """Keep the model on the CPU while it is not scoring. Default: ``train.offload_idle_roles``."""
    compile: bool = False
    """Run the model through torch.compile: the first scores take longer, later ones less. Scores change by rounding."""
    processes: Literal["sharded", "all", "one"] | None = None
    """Which processes of a run hold the model. ``sharded``: each holds a part of its weights; needs an engine that
    shards weights (FSDP2, ZeRO-3). ``all``: each holds all of it. With both, every process scores its share of the
    answers. ``one``: only the first process holds it and scores all answers while the others wait. Default: ``sharded``
    if the engine shards weights and the model is neither quantized nor compiled, else ``all``."""

    @property
    def can_be_sharded(self) -> bool:
        """Whether an engine could spread its weights."""
        return self.quantization is None and not self.compile

    @model_validator(mode="after")
    def _stays_where_it_is(self) -> OwnModelReward:
        if self.offload and self.quantization is not None:
            raise ValueError(
                f"offload: quantized weights (quantization {self.quantization}) stay on their device; leave one out"
            )
        if self.processes == "sharded" and not self.can_be_sharded:
            what = f"quantized weights (quantization {self.quantization})" if self.quantization else "compile"
            raise ValueError(f"processes sharded: {what} and sharded weights cannot be combined; leave one out")
        return self


class ModelReward(OwnModelReward):
    """A sequence classifier with one label, or one label of several, of any architecture."""

    type: Literal["model"]
    """``model``: a sequence classifier with one label."""
    path: str
    """Hub id or folder of the sequence classifier, or of a PEFT adapter of one (loaded on the adapter's own base)."""
    label: NonNegativeInt | str | None = None
    """Label of a classifier with several labels (sentiment, toxicity, …) whose logit is the score, by its name in the
    model's ``id2label`` or its number. Default: none, for a classifier with one label."""


class ValueHeadReward(OwnModelReward):
    """A reward model in LLaMA-Factory's format."""

    type: Literal["value_head"]
    """``value_head``: a language model with a value head in a separate file; the score is the head's value at the last
    token."""
    path: str
    """Hub id or folder with ``value_head.safetensors`` or ``value_head.bin`` and a causal language model or a PEFT
    adapter of one; a checkpoint-N of LLaMA-Factory's reward stage also works."""


class AdapterReward(_Reward):
    """A LoRA reward adapter on the policy's own base."""

    type: Literal["adapter"]
    """``adapter``: a LoRA reward adapter with its head, on the policy's own base model."""
    path: str
    """Folder of the PEFT adapter, trained on the policy's base: as a sequence classifier with one label, or by
    LLaMA-Factory, which saves ``value_head.safetensors`` or ``value_head.bin`` beside it."""
    batch_size: PositiveInt = 16
    """Answers scored in one forward pass."""


class FunctionReward(_Reward):
    """A Python function."""

    type: Literal["function"]
    """``function``: ``f(prompts, completions, **columns) -> list[float | list | None]``, sync or async. A list scores
    the tokens of an answer, or its steps as ``[end, score]``. Or a function with OpenRLHF's or verl's signature."""
    path: str
    """Python file that holds the function (``my_rewards.py``), or an import path (``package.module``)."""
    name: str
    """Name of the function; also its name in metrics and samples."""
    label: str | None = None
    """Dataset column that a function with OpenRLHF's signature gets as ``labels``. Default: empty labels."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, by name, the same in every call; they go before columns of these names."""
    missing: float | None = None
    """Score of an answer for which the function returns None, meaning that it has no opinion. Default: None is an
    error."""


class ReadyReward(_Reward):
    """What all ready-made functions are."""


class ColumnReward(ReadyReward):
    """What all ready-made functions have that compare an answer with the dataset."""

    column: str = "answer"
    """Dataset column with the expected result: text or a number in every row."""


class LengthTargetReward(ReadyReward):
    """How close the length of an answer is to a target."""

    type: Literal["length_target"]
    """``length_target``: −|length − target| / target; 0 at the target."""
    target: PositiveInt
    """Target length."""
    unit: Literal["words", "characters"] = "words"
    """What is counted; words are separated by white space."""


class RegexReward(ReadyReward):
    """Whether an answer matches a pattern."""

    type: Literal["regex"]
    """``regex``: 1 if the pattern is found in the answer, else 0."""
    pattern: str
    """Regular expression of Python's re. Put ``\\A`` and ``\\Z`` around it to match the whole answer; after ``(?s)``, a
    dot also matches line ends."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern


class ExactMatchReward(ColumnReward):
    """Whether an answer equals a dataset column."""

    type: Literal["exact_match"]
    """``exact_match``: 1 if the answer equals the text of the column, ignoring white space around both, else 0."""


class MathMatchReward(ColumnReward):
    """Whether the result of an answer equals a dataset column."""

    type: Literal["math_match"]
    """``math_match``: 1 if the boxed or last expression of the answer equals that of the column, LaTeX or a number,
    else 0. Needs the package math-verify: ``pip install 'tether[math]'``."""


class RepetitionReward(ReadyReward):
    """How much an answer repeats itself."""

    type: Literal["repetition"]
    """``repetition``: minus the share of the answer's word n-grams that occurred earlier in it; 0 without
    repetition."""
    n: PositiveInt = 3
    """Words per n-gram."""


class JsonValidReward(ReadyReward):
    """Whether an answer is JSON."""

    type: Literal["json_valid"]
    """``json_valid``: 1 if the whole answer is one JSON value, else 0."""


class ServiceReward(_Reward):
    """What all sources that ask a service have."""

    api_key_env: str | None = None
    """Environment variable that holds the service's key. The key is sent as ``Authorization: Bearer`` and never written
    to a file."""
    connect_timeout: PositiveFloat = 5.0
    """Seconds in which a connection must be established."""
    read_timeout: PositiveFloat = 60.0
    """Seconds after that in which the whole reply must arrive."""
    retries: Annotated[int, Field(ge=0, le=100)] = 4
    """Maximum number of retries of a request that timed out, lost its connection, or got status 429 or 5xx."""
    retry_delay: PositiveFloat = 1.0
    """Seconds before the first retry. The delay doubles with every retry, up to 30; it is longer if the service asks
    for more with ``Retry-After``, also up to 30."""
    max_concurrency: PositiveInt = 8
    """Requests in flight at once, for all processes of a run together."""

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and re.fullmatch("[A-Z_][A-Z0-9_]*", name) is None:
            raise ValueError("wanted the name of an environment variable (A-Z, 0-9 and _), not the key itself")
        return name


class HttpReward(ServiceReward):
    """A scoring service."""

    type: Literal["http"]
    """``http``: a service that returns scores for prompts and responses; docs/rewards.md describes the protocols."""
    url: Url
    """Address to send requests to: ``http://127.0.0.1:8000/score``."""
    protocol: Literal["tether", "llamafactory", "openrlhf"] = "tether"
    """``tether``: prompts, responses and columns, as ``tether serve-reward`` expects them. ``llamafactory`` and
    ``openrlhf``: whole texts, as reward servers of these projects expect them."""
    columns: list[str] | None = None
    """Dataset columns to send. Default: all. Protocol llamafactory sends none, openrlhf at most one, as labels."""
    batch_size: PositiveInt = 32
    """Maximum number of answers per request."""
    missing: float | None = None
    """Score of an answer for which the service returns null. Default: null is an error. A status other than 200 is
    always an error."""

    @model_validator(mode="after")
    def _columns_have_a_place(self) -> HttpReward:
        if self.columns and self.protocol == "llamafactory":
            raise ValueError("columns: protocol llamafactory cannot send them; leave them out")
        if self.protocol == "openrlhf" and len(self.columns or ()) > 1:
            raise ValueError(f"columns: got {len(self.columns)}; protocol openrlhf sends one of them, as labels")
        return self


class JudgeReward(ServiceReward):
    """A language model that grades answers."""

    type: Literal["judge"]
    """``judge``: a chat model behind an OpenAI-compatible service, which gets a rubric and replies with a number."""
    base_url: Url
    """Address of the service, without ``/chat/completions``: ``https://api.openai.com/v1``."""
    model: str
    """Name of the model in the service."""
    rubric: str
    """Prompt for the judge, with ``{response}`` and, if it needs it, ``{prompt}``. The last line of the reply must be
    the requested number: alone, after a label (``Score: 7``), or out of the highest number (``7/10``)."""
    scale: Annotated[list[float], Field(min_length=2, max_length=2, default_factory=lambda: [1.0, 10.0])]
    """Lowest and highest number. The score is the number itself."""
    attempts: PositiveInt = 3
    """Maximum number of times that the judge is asked until a reply holds a number on the scale."""
    missing: float | None = None
    """Score of an answer for which no reply holds such a number, or which a content filter of the service rejects with
    status 400. Default: both are errors. Timeouts, a wrong key and a service that is down are always errors."""
    temperature: NonNegativeFloat | None = 0.0
    """Temperature of the judge. null leaves it to the service, for models that reject the parameter."""
    max_tokens: PositiveInt | None = 16
    """Maximum number of tokens of a reply; null leaves it to the service. A rubric that asks for reasons first needs
    more."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request: ``{max_completion_tokens: 2000}``."""

    @field_validator("base_url")
    @classmethod
    def _is_a_base(cls, url: str) -> str:
        if url.rstrip("/").endswith("/completions"):
            raise ValueError(f"got {url}, wanted the address without /chat/completions")
        return url

    @field_validator("rubric")
    @classmethod
    def _shows_the_answer(cls, rubric: str) -> str:
        if "{response}" not in rubric:
            raise ValueError("wanted text with {response} where the answer goes, and {prompt} where the prompt does")
        return rubric

    @field_validator("extra_body")
    @classmethod
    def _adds_to_the_request(cls, extra: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(extra.keys() & {"model", "messages", "temperature", "max_tokens", "stream"})
        if taken:
            raise ValueError(
                f"holds {', '.join(taken)}, which the source itself sends or cannot use; leave it out here"
            )
        return extra

    @field_validator("scale")
    @classmethod
    def _rises(cls, scale: list[float]) -> list[float]:
        if scale[0] >= scale[1]:
            raise ValueError(f"got {scale[0]:g} to {scale[1]:g}, wanted the lower number first")
        return scale


_Single = (
    ModelReward
    | ValueHeadReward
    | AdapterReward
    | FunctionReward
    | LengthTargetReward
    | RegexReward
    | ExactMatchReward
    | MathMatchReward
    | RepetitionReward
    | JsonValidReward
    | HttpReward
    | JudgeReward
)


class EnsembleReward(_Reward):
    """Several sources that judge the same quality."""

    type: Literal["ensemble"]
    """``ensemble``: mean, minimum, or mean minus weighted variance of the members' scores, after each member's own
    norm, clip and weight."""
    members: Annotated[list[Annotated[_Single, Field(discriminator="type")]], Field(min_length=2)]
    """The member sources, with the same keys as other sources; each is logged as NAME/MEMBER."""
    reduce: Literal["mean", "min", "uwo"] = "mean"
    """``mean``; ``min``: the worst case; ``uwo``: mean − coef · variance, so that disagreement lowers the score.
    Source: Coste et al. 2023, https://arxiv.org/abs/2310.02743."""
    coef: NonNegativeFloat | None = None
    """Weight of the variance; for uwo only."""

    @model_validator(mode="after")
    def _fits(self) -> EnsembleReward:
        names = reward_names(self.members)
        if len(set(names)) != len(names):
            raise ValueError(f"members: names must be unique, got {', '.join(names)}")
        if (self.coef is None) == (self.reduce == "uwo"):
            what = "needs coef, the weight of the variance" if self.coef is None else "takes no coef: leave it out"
            raise ValueError(f"reduce {self.reduce} {what}")
        return self


RewardConfig = Annotated[_Single | EnsembleReward, Field(discriminator="type")]


def sources_of(rewards: Sequence[RewardConfig], key: str = "rewards") -> Iterator[tuple[str, RewardConfig]]:
    """Key and section of every reward source, an ensemble's members after it."""
    for i, reward in enumerate(rewards):
        yield f"{key}.{i}", reward
        if isinstance(reward, EnsembleReward):
            yield from sources_of(reward.members, f"{key}.{i}.members")


def measured_norms(rewards: Sequence[RewardConfig]) -> list[str]:
    """Keys of the sources whose norm a run measures by itself."""
    return [key for key, reward in sources_of(rewards) if reward.norm == "auto"]


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """Names of reward sources in metrics and samples: their own, or their type, with a number if there are several."""
    return [
        reward.name or (reward.type if len(rewards) == 1 else f"{reward.type}_{i}") for i, reward in enumerate(rewards)
    ]
