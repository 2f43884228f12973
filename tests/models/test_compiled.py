"""Layers that are compiled in passes: the same numbers and gradients, decoding left alone, and what is refused."""

import sysconfig
from functools import partial

import pytest
import torch

from tests.models.build import micro_batch, roles_of, run_config, save_model
from tests.train.runs import tiny_run
from tether import train_policy
from tether.errors import ConfigError
from tether.models import compiled, products
from tether.models.compiled import check_compile, compiled_layers
from tether.models.layers import transformer_layers
from tether.models.products import with_quick_products


@pytest.fixture
def eager(monkeypatch):
    """torch.compile that compiles nothing and counts the calls of what it was given."""
    calls = []

    def compile(forward, **options):
        assert options == {"dynamic": True}

        def counted(*arguments, **named):
            calls.append(forward.__self__)
            return forward(*arguments, **named)

        return counted

    monkeypatch.setattr(torch, "compile", compile)
    return calls


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """The compiler keeps what both tests need in one folder, and nothing of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_call_compiled_layers_and_decoding_does_not(tmp_path, eager, checkpointing):
    config = run_config(
        save_model(tmp_path), value={"kind": "model"}, train={"compile": True, "gradient_checkpointing": checkpointing}
    )
    roles = roles_of(config)
    layers = {name: transformer_layers(roles.role(name).model) for name in ("policy", "reference", "value")}
    batch = micro_batch()
    eager.clear()  # the head was tried
    roles.score_pass(batch, 1.0)
    assert eager == layers["policy"] + layers["value"]
    eager.clear()
    roles.ref_logprobs(batch, 1.0)
    assert eager == layers["reference"]
    eager.clear()
    for pass_ in roles.passes:
        with pass_(batch, temperature=1.0) as out:
            sum(x.sum() for x in (out.logprobs, out.values) if x is not None).backward()
    assert len(eager) == (2 if checkpointing else 1) * 4, "recomputed layers are compiled ones too"
    eager.clear()
    with torch.no_grad(), roles.use("policy") as model:
        model(input_ids=batch.token_ids)
    assert eager == [] and all("forward" not in vars(layer) for each in layers.values() for layer in each)


def test_layers_come_back_whatever_happens(tmp_path, eager):
    model = roles_of(run_config(save_model(tmp_path), train={"compile": True})).policy
    with pytest.raises(RuntimeError), compiled_layers(model):
        assert all("forward" in vars(layer) for layer in transformer_layers(model))
        raise RuntimeError
    assert all("forward" not in vars(layer) for layer in transformer_layers(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_numbers_and_gradients_are_those_without(tmp_path, monkeypatch, compiler):
    """With and without gradients, in two shapes, with products of oneDNN within."""
    seen, product = [], products.product
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "product", lambda *operands: (seen.append(1), product(*operands))[1])
    folder, outputs, gradients, counts = save_model(tmp_path), [], [], []
    for is_compiled in (False, True):
        roles = roles_of(run_config(folder, train={"compile": is_compiled}))
        torch.nn.init.ones_(roles.role("value").head.weight)  # a fresh one says 0
        with_quick_products(roles.policy)
        seen.clear()
        (pass_, *_) = roles.passes
        out = roles.score_pass(micro_batch(), 0.7)
        with pass_(micro_batch(), temperature=0.7) as new:
            new.logprobs.sum().backward()
        counts.append(len(seen))
        outputs.append([out.logprobs, out.values])
        gradients.append(torch.cat([p.grad.flatten() for p in pass_.parameters()]))
    assert counts[0] == counts[1] > 0
    for one, other in zip(*outputs, strict=True):
        assert one.count_nonzero() > 0
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    one, other = gradients
    assert (one - other).norm() <= 2e-6 * one.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_how_a_layer_multiplies_does_not_break_its_graph(tmp_path, monkeypatch, compiler):
    """The processor is asked outside of compiled code, as it really is asked."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True))
    for asked in (products.half_is_slow, products.onednn_is_faster, products.few_rows_are_slow, products.least_rows):
        asked.cache_clear()
    folder = save_model(tmp_path)
    roles = roles_of(run_config(folder, train={"compile": True}))
    for module in roles.policy.modules():
        module.__class__ = products.QUICK.get(type(module), type(module))
    out = roles.score_pass(micro_batch(), 0.7)
    assert torch.isfinite(out.logprobs).all()


def test_what_compiling_needs_is_asked_for_before_a_model_is_loaded(tmp_path, monkeypatch):
    check_compile("train.compile", "cpu")
    monkeypatch.setattr(compiled, "packages_distributions", dict)
    with pytest.raises(ConfigError, match=r"torch\.compile needs the package triton on cuda"):
        check_compile("train.compile", "cuda")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(ConfigError, match=r"train\.compile: Python's headers, .* are missing"):
            check_compile("train.compile", "cpu")
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"train\.compile: no C\+\+ compiler was found \(g\+\+ or clang\+\+\)"):
        train_policy(tiny_run(tmp_path, train__compile=True))
