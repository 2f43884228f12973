"""Rows 69 and 71 of the fault list: gradient checkpointing in rollouts, and every mode of training.

Rows are numbered as users of other trainers reported them.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from tests.train.runs import tiny_run
from tether.metrics.writers import read_jsonl
from tether.models import recompute
from tether.models.loading import load_causal_lm
from tether.train import build as running
from tether.train.run import train_policy
from tether.types import Sampling

MODES = {
    "full": {},
    "lora": {"model__lora": {"r": 2}},
    "frozen layers": {"model__freeze_layers": 1},
}
CRITICS = ("model", "head")


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_69_checkpointing_neither_slows_nor_changes_the_rollout_and_is_on_in_the_update(
    tmp_path, monkeypatch, kind, mode
):
    """Decoding feeds one token a step, warns of nothing (warnings are errors), and writes the same text."""
    widths, recomputed = [], []
    checkpoint, build = recompute.checkpoint, running.build_generator

    def noted_checkpoint(*args, **kwargs):
        recomputed.append(1)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(recompute, "checkpoint", noted_checkpoint)

    def spied(config, roles):
        generator = build(config, roles)
        generate = generator.generate

        def noted(*args):
            list(generate(args[0][:1], Sampling(1)))  # how the model is decoded is tried before its first answer
            model = roles.role("policy").model
            hook = model.register_forward_pre_hook(
                lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
            )
            try:
                yield from generate(*args)
            finally:
                hook.remove()

        monkeypatch.setattr(generator, "generate", noted)
        return generator

    monkeypatch.setattr(running, "build_generator", spied)
    said, numbers, steps = [], [], []
    for checkpointing in (False, True):
        widths.clear()
        recomputed.clear()
        config = tiny_run(
            tmp_path,
            kind=kind,
            output_dir=str(tmp_path / str(checkpointing)),
            train__gradient_checkpointing=checkpointing,
            sampling__response_length=12,
            **MODES[mode],
        )
        result = train_policy(config)
        rows = read_jsonl(config.output_dir / "samples.jsonl")
        said.append([row["response"] for row in rows])
        numbers.append([row["loss/policy_avg"] for row in result.updates])
        steps.append(list(widths))
        assert bool(recomputed) == checkpointing
    assert said[0] == said[1]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-6)
    assert steps[0] == steps[1]
    prefills = sum(width > 1 for width in steps[1])
    assert prefills <= 2 and len(steps[1]) - prefills >= 10


def checksums(folder, name="model.safetensors"):
    return {key: hashlib.sha256(t.numpy().tobytes()).hexdigest() for key, t in load_file(folder / name).items()}


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("mode", MODES)
def test_71_in_every_mode_what_is_meant_to_change_changes_and_nothing_else(tmp_path, mode, critic):
    config = tiny_run(tmp_path, tied=False, value__kind=critic, value__save=True, **MODES[mode])
    base = checksums(tmp_path / "llama-untied")
    values = []
    roles_of = running.build_roles

    def noted(*args, **kwargs):
        values.append(roles_of(*args, **kwargs))
        return values[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "build_roles", noted)
        train_policy(config)
    (roles,) = values
    head = roles.role("value").head.weight.detach()
    assert float(head.abs().max()) > 0, "the critic began at 0 and learned nothing"
    assert checksums(tmp_path / "llama-untied") == base
    if mode == "lora":
        adapter = load_file(config.output_dir / "adapter_model.safetensors")
        assert all("lora_" in name for name in adapter)
        assert all(float(t.abs().max()) > 0 for name, t in adapter.items() if "lora_B" in name)
        start, now = load_causal_lm(config.model.path, dtype=None), roles.role("policy").model
        own = {name.replace(".base_layer", ""): p for name, p in now.named_parameters() if "lora_" not in name}
        assert all(torch.equal(own[name], p) for name, p in start.named_parameters())
        return
    changed = {name for name, digest in checksums(config.output_dir).items() if digest != base[name]}
    kept = base.keys() - changed
    frozen = {name for name in base if name.startswith(("model.embed_tokens", "model.layers.0."))}
    assert kept == (frozen if mode == "frozen layers" else set())
