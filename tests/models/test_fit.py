"""How long texts may be for a model."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, XLNetConfig

from tests.generation.scopes import answers
from tests.tiny import VOCAB_SIZE
from tether.errors import ConfigError
from tether.models.fit import positions, steady_positions, steady_positions_told
from tether.types import Request, Sampling

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
BORDER = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}


def longrope():
    return Phi3Config(
        **BORDER,
        rope_parameters=LONGROPE,
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=3,
        initializer_range=0.3,
        sliding_window=None,
    )


def test_positions_of_configurations():
    llama = LlamaConfig(max_position_embeddings=64)
    assert positions(llama) == steady_positions(llama) == 64 and steady_positions_told(llama) == "64"
    assert positions(XLNetConfig()) is steady_positions(XLNetConfig()) is None
    assert positions(longrope()) == 64 and steady_positions(longrope()) == 16
    assert steady_positions_told(longrope()).startswith("16 before longrope")


def test_texts_beyond_the_border_of_longrope_are_refused_and_those_before_it_are_the_models():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(longrope()).eval()
    asked = [Request([5, 7, 8], 0), Request(list(range(7, 17)), 1)]
    for request, answer in zip(asked, answers(model, asked, Sampling(6)), strict=True):
        ids = torch.tensor([[*request.token_ids, *answer.token_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1].detach()
        wanted = logits.log_softmax(-1)[range(6), answer.token_ids]
        assert answer.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
    with pytest.raises(ConfigError, match=r"10 tokens .* 17 positions, but the model has 16 before longrope"):
        answers(model, asked, Sampling(7))
