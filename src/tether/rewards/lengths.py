"""Checks that texts fit the reward models that will read them, before any model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tether.config.rewards import OwnModelReward, RewardConfig, ValueHeadReward, sources_of
from tether.errors import ConfigError, RewardError
from tether.models.build import num_embeddings
from tether.models.classifiers import empty_classifier, reads_last_token
from tether.models.fit import steady_positions, without_row
from tether.models.loading import load_config
from tether.models.paths import own_weights
from tether.models.tokenizer import load_tokenizer
from tether.rewards.encoder import pools_at, position_limit
from tether.rewards.missing import way_out_of
from tether.rewards.reading import LETTER, JudgedText, Reader, same_tokenizer
from tether.types import Prompt, RewardBatch


class Room:
    """How many tokens a reward model reads and can read, by its tokenizer and configuration.

    Args:
        config: its configuration section.
        policy_tokenizer: the tokenizer that made the ids of queries and answers.
        now: as in ``Reader``.
    """

    def __init__(
        self, config: OwnModelReward, policy_tokenizer: PreTrainedTokenizerBase, now: str | None = None
    ) -> None:
        code, name = {"trust_remote_code": config.trust_remote_code}, config.name or config.path
        tokenizer = load_tokenizer(config.path, revision=config.revision, **code)
        if isinstance(config, ValueHeadReward):
            base, revision = own_weights(config.path, config.revision)
            self._is_decoder, limit, end_id = True, steady_positions(load_config(base, revision=revision, **code)), None
        else:
            model = empty_classifier(config.path, revision=config.revision, **code)
            self._is_decoder = reads_last_token(model)
            limit = steady_positions(model.config) if self._is_decoder else position_limit(model)
            end_id = None if self._is_decoder else pools_at(model, name)
        self.limit = config.max_length or limit
        """Maximum number of tokens that it reads; None if there is no limit."""
        self.shares_ids = (
            self._is_decoder and config.input_format == "auto" and same_tokenizer(tokenizer, policy_tokenizer)
        )
        """Whether it reads the policy's token ids."""
        self._reader = Reader(
            tokenizer, config.input_format, name, special_tokens=config.special_tokens, now=now, end_id=end_id
        )

    def lengths(self, batch: RewardBatch) -> list[int]:
        """Number of tokens that it would read for each answer with its prompt.

        Raises:
            RewardError: a conversation cannot be put into its chat template.
        """
        if self.shares_ids:
            return [len(batch.read_ids(row)) for row in range(len(batch))]
        return [self._length(text) for text in self._reader.texts(batch)]

    def length_of(self, prompt: Prompt) -> int:
        """Number of tokens that it would read for a prompt with the shortest answer.

        Raises:
            RewardError: as in ``lengths``.
        """
        if self.shares_ids:
            return len(prompt.token_ids) + 1
        where = f"an answer to row {prompt.row} of the prompts"
        return self._length(self._reader.text(prompt.source, prompt.conversation, LETTER, where))

    def _length(self, text: JudgedText) -> int:
        read = self._reader.token_ids(text) if self._is_decoder else self._reader.features(text)["input_ids"]
        return len(read)


def check_room(
    configs: Sequence[RewardConfig],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    response_length: int,
    policy_embeddings: int,
    now: str | None = None,
) -> list[str]:
    """Checks that answers to all prompts fit the reward models; loads tokenizers and configurations only.

    Args:
        tokenizer: the policy's.
        response_length: maximum number of tokens in an answer.
        policy_embeddings: number of tokens that the policy has embeddings for.
        now: as in ``Reader``.

    Returns:
        Warnings of texts that may turn out too long.

    Raises:
        ConfigError: a model that reads the policy's token ids has no embedding for a token, or no room for the longest
            query with an answer and no score for texts that are too long; a prompt leaves no room for an answer, or
            cannot be shown to a model that reads text.
    """
    notes = []
    for key, config in sources_of(configs):
        if not isinstance(config, OwnModelReward):
            continue
        room = Room(config, tokenizer, now)
        if room.shares_ids and (lacks := _lacks(config, tokenizer, policy_embeddings)) is not None:
            raise ConfigError(
                f"{key}: {config.path} reads the policy's token ids, and has {lacks}: use a reward model with the "
                "policy's vocabulary, or set input_format to chat or joined, whichever it was trained on, to show it "
                "text"
            )
        if room.limit is None:
            continue
        if room.shares_ids and config.missing is None:
            _check_whole(key, config, room.limit, prompts, response_length)
        else:
            notes += _check_beginning(key, config, room, prompts, response_length)
    return notes


def _check_whole(
    key: str, config: OwnModelReward, limit: int, prompts: Sequence[Prompt], response_length: int
) -> None:
    """Raises ``ConfigError`` if the longest query with the longest answer exceeds what a model reads of the policy's
    token ids."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + response_length > limit:
        raise ConfigError(
            f"{key}: sampling.response_length {response_length} after the longest query of {longest} tokens makes "
            f"{longest + response_length}, but {config.path} reads {limit}: lower it, {_ways(key, config)}, or "
            f"{way_out_of(key)}"
        )


def _check_beginning(
    key: str, config: OwnModelReward, room: Room, prompts: Sequence[Prompt], response_length: int
) -> list[str]:
    """Raises ``ConfigError`` if a prompt leaves no room for an answer; a warning if the longest one may leave too
    little."""
    try:
        lengths = [room.length_of(prompt) for prompt in prompts]
    except RewardError as error:
        raise ConfigError(f"{key}: {error}") from error
    longest, row = max((length, -prompt.row) for length, prompt in zip(lengths, prompts, strict=True))
    told = f"row {-row} of the prompts has {longest} tokens with an answer of one letter"
    ways = _ways(key, config)
    if longest > room.limit:
        raise ConfigError(f"{key}: {told}, but {config.path} reads {room.limit}: {ways}")
    left = room.limit - longest + 1
    # there may be more of its tokens than of the policy's
    if left >= (response_length if room.shares_ids else 2 * response_length):
        return []
    end = f"ends the run: {ways}, or {way_out_of(key)}" if config.missing is None else f"counts {config.missing:g}"
    return [
        f"{key}: {told}, which leaves {left} of the {room.limit} tokens that {config.path} reads for an answer, but "
        f"sampling.response_length is {response_length} of the policy's tokens. A longer answer {end}"
    ]


def _ways(key: str, config: OwnModelReward) -> str:
    """What makes room for longer answers."""
    return f"lower data.max_prompt_length, or use a reward model that reads more{or_raise(key, config)}"


def or_raise(key: str, config: OwnModelReward) -> str:
    """Further advice for a limit that the user set."""
    return "" if config.max_length is None else f", or raise {key}.max_length"


def _lacks(config: OwnModelReward, tokenizer: PreTrainedTokenizerBase, policy_embeddings: int) -> str | None:
    """What a model lacks to read the policy's token ids, in words; None if it can."""
    origin = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    return without_row(tokenizer, num_embeddings(config.path, **origin), policy_embeddings)
