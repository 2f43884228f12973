"""The generator of a run decodes with the policy of its roles, in batches of ``sampling.batch_size``."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.generation.scopes import answers
from tests.tiny import EOS, save_tiny
from tether.config.schema import RunConfig
from tether.generation.build import build_generator
from tether.models.build import build_roles
from tether.types import Request, Sampling


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize(("lora", "cache"), [(None, "dynamic"), ({"r": 2}, "dynamic"), ({"r": 2}, "static")])
def test_a_run_decodes_with_its_policy(tmp_path, lora, cache):
    folder = save_tiny(tmp_path / "model", "gpt2")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32", "lora": lora},
            "rewards": [{"type": "function", "path": "my_rewards.py", "name": "brevity"}],
            "data": {"prompts": "prompts.jsonl"},
            "sampling": {"batch_size": 3, "cache_implementation": cache},
            "train": {"max_steps": 1},
            "output_dir": str(tmp_path / "run"),
        }
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    roles = build_roles(config, tokenizer, device="cpu", autocast_dtype=None)
    generator = build_generator(config, roles)
    asked, sampling = [Request([7 + i] * (1 + i % 3), i) for i in range(7)], Sampling(12, 1.0, frozenset({EOS}))
    widths = []
    list(generator.generate(asked[:1], sampling))  # how it decodes is found out before the first answer
    with roles.use("policy") as policy:
        policy.register_forward_pre_hook(
            lambda _, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
        )
    got = dict(generator.generate(asked, sampling))
    wanted = answers(AutoModelForCausalLM.from_pretrained(folder), asked, sampling)
    assert [got[i].token_ids for i in range(7)] == [completion.token_ids for completion in wanted]
    assert max(widths) == 3 and (2 in widths) == (cache == "dynamic"), "who ended leaves it"
