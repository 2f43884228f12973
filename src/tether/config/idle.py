"""Keys of a run that are read only if another key asks for it; without that key, they would have no effect.

Their values count, not whether they are set: the configuration file that a run writes sets every key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.config.rewards import measured_norms

Get = Callable[[str], Any]
"""The value at a dotted key, or its default if it is left out."""


@dataclass(frozen=True)
class Needs:
    """What a key needs to be read."""

    is_read: Callable[[Get], bool]
    """Whether it is."""
    why: str
    """Why it is not, and what to set; ``{key}`` stands for the key, the names of ``_NAMED`` for values."""


_NAMED = {"estimator": "ppo.advantage_estimator", "lam_alpha": "ppo.lam_alpha", "value_lam": "ppo.value_lam"}
_REFERENCE = Needs(
    lambda of: of("ppo.kl_coef") != 0, "there is no reference with ppo.kl_coef 0: set it above 0, or leave {key} out"
)
_CRITIC = Needs(
    lambda of: of("ppo.advantage_estimator") == "gae",
    "only generalized advantage estimation uses it, but ppo.advantage_estimator is {estimator}: "
    "leave it out, or set ppo.advantage_estimator to gae",
)
_PUSH = Needs(lambda of: of("train.push_to_hub"), "nothing is pushed: set train.push_to_hub: true, or leave {key} out")
_HELD_OUT = Needs(
    lambda of: of("data.eval_prompts") is not None,
    "there are no held-out prompts of their own source: set data.eval_prompts (the source of data.prompts again, for "
    "another part of it), or leave {key} out",
)
_DEMONSTRATIONS = Needs(
    lambda of: of("data.ptx") is not None, "there are no demonstrations: set data.ptx, or leave {key} out"
)
NEEDS: Mapping[str, Sequence[Needs]] = {
    "data.eval_split": [_HELD_OUT],
    "data.eval_subset": [_HELD_OUT],
    "data.eval_revision": [_HELD_OUT],
    "data.ptx_split": [_DEMONSTRATIONS],
    "data.ptx_subset": [_DEMONSTRATIONS],
    "data.ptx_revision": [_DEMONSTRATIONS],
    "data.ptx_columns": [_DEMONSTRATIONS],
    "data.max_ptx_length": [_DEMONSTRATIONS],
    "ppo.kl_in": [_REFERENCE],
    "ppo.kl_estimator": [_REFERENCE],
    "ppo.kl_target": [
        Needs(
            lambda of: of("ppo.kl_coef") != 0,
            "ppo.kl_coef is 0, which the adaptive controller multiplies and so never changes: set it to the "
            "coefficient to start from, or leave {key} out",
        )
    ],
    "ppo.kl_horizon": [
        Needs(
            lambda of: of("ppo.kl_target") is not None,
            "the coefficient is fixed: set ppo.kl_target, or leave {key} out",
        )
    ],
    "ppo.gamma": [
        Needs(
            lambda of: of("ppo.advantage_estimator") not in ("rloo", "grpo"),
            "{estimator} uses the undiscounted return of an answer: leave it out, or set "
            "ppo.advantage_estimator to gae or reinforce_pp",
        )
    ],
    "ppo.lam": [
        _CRITIC,
        Needs(
            lambda of: of("ppo.lam_alpha") is None or of("ppo.value_lam") is None,
            "ppo.lam_alpha {lam_alpha} replaces it in the policy's advantages, and ppo.value_lam "
            "{value_lam} in the critic's targets: leave one of the three out",
        ),
    ],
    "ppo.value_lam": [_CRITIC],
    "ppo.lam_alpha": [_CRITIC],
    "ppo.cliprange_value": [
        Needs(
            _CRITIC.is_read,
            "there is no critic with ppo.advantage_estimator {estimator}: leave {key} out, or set "
            "ppo.advantage_estimator to gae",
        )
    ],
    "ppo.importance_sampling_cap": [
        Needs(
            lambda of: of("sampling.vllm") is not None,
            "answers come from the policy's own forward pass, so their weights are 1: set sampling.vllm: {{}}, or "
            "leave {key} out",
        )
    ],
    "sampling.cache_implementation": [
        Needs(
            lambda of: of("sampling.vllm") is None,
            "vLLM has a cache of its own: leave {key} or sampling.vllm out",
        )
    ],
    "ppo.vf_coef": [
        Needs(
            _CRITIC.is_read,
            "there is no critic with ppo.advantage_estimator {estimator}: leave {key} out, or set "
            "ppo.advantage_estimator to gae and value.kind to head",
        ),
        Needs(
            lambda of: of("value.kind") == "head",
            "policy and critic have optimizers of their own: set value.learning_rate, or value.kind: head",
        ),
    ],
    "ppo.whiten_rewards": [
        Needs(
            lambda of: of("ppo.advantage_estimator") != "grpo",
            "grpo divides scores by their own spread: leave it out, or set another ppo.advantage_estimator",
        )
    ],
    "ppo.score_norm_samples": [
        Needs(
            lambda of: of("ppo.score_norm") == "frozen" or bool(measured_norms(of("rewards"))),
            "nothing is measured on them: set ppo.score_norm to frozen or the norm of a reward to auto, or leave "
            "{key} out",
        )
    ],
    "ppo.overlong_penalty": [
        Needs(
            lambda of: of("ppo.overlong_buffer") is not None,
            "no answer is overlong: set ppo.overlong_buffer, or leave {key} out",
        )
    ],
    "train.greater_is_better": [
        Needs(
            lambda of: of("train.metric_for_best_model") is not None,
            "no evaluation is compared: set train.metric_for_best_model, or leave {key} out",
        )
    ],
    "train.hub_model_id": [_PUSH],
    "train.hub_private_repo": [_PUSH],
}
"""What each key needs."""


def idle(of: Get, default: Get) -> Iterator[tuple[str, str]]:
    """Keys that are set to something other than their default and are not read, and why not.

    Args:
        of: the configuration.
        default: the value that a key has if it is left out.
    """
    for key, all_needs in NEEDS.items():
        if of(key) != default(key):
            why = next((needs.why for needs in all_needs if not needs.is_read(of)), None)
            if why is not None:
                yield key, why.format(key=key, **{name: of(named) for name, named in _NAMED.items()})
