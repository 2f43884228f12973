"""What a step of decoding asks of the host: on an accelerator, a copy to or from it waits for the device."""

from collections import Counter
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from tests.operators import operators
from tests.tiny import tiny_causal_lm
from tether.generation.batch import Batch, Decoding
from tether.generation.caches import StaticCaches
from tether.types import Request, Sampling

QUERY, OTHER = (7, 20, 13), (9, 8, 30)
IN_MODEL, READ = "the model's forward", "values of a tensor are read"
KINDS = {"aten::lift_fresh": "made", "aten::_local_scalar_dense": "read", READ: "read"}
READS = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy)


class MarkedReads(TorchFunctionMode):
    """Marks reads of whole tensors, for which a CPU calls no operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with record_function(READ) if func in READS else nullcontext():
            return func(*args, **kwargs or {})


def host_work(run, model=None):
    """Counts tensors that ``run`` makes of Python values (also of a list as an index) and values that it reads from
    tensors (also by ``if``), outside of the model's forward."""
    forward = record_function(IN_MODEL)

    def enter(*call):
        forward.__enter__()

    def leave(*call):
        forward.__exit__(None, None, None)

    with ExitStack() as stack:
        if model is not None:
            stack.enter_context(model.register_forward_pre_hook(enter))
            stack.enter_context(model.register_forward_hook(leave))
        stack.enter_context(MarkedReads())
        called = operators(run, outside=IN_MODEL)
    counts = Counter()
    for name in KINDS.keys() & called.keys():
        counts[KINDS[name]] += called[name]
    return counts


def test_work_of_the_host_is_counted():
    x, index = torch.zeros(3, 2), torch.tensor([0, 2])
    made = (lambda: torch.tensor([1]), lambda: x[[0, 2]], lambda: x[[0, 2], 0].add_(1))
    read = (x.tolist, x[0, 0].item, x.cpu, lambda: bool(x.any()))
    neither = (lambda: x[index], lambda: x[:, -1:] + 1, lambda: x.new_zeros(3, 1), lambda: x[:, 0].to(torch.int64))
    for calls, wanted in ((made, {"made": 1}), (read, {"read": 1}), (neither, {})):
        for call in calls:
            assert host_work(call) == wanted


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}], ids=str)
@pytest.mark.parametrize("way", Decoding)
@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 2]], ids=["all rows", "one has ended"])
@pytest.mark.parametrize("tokens", [3, 11])
def test_a_token_is_read_at_once_and_nothing_is_copied_to_the_device_for_it(tokens, kept, way, options):
    model, done = tiny_causal_lm("llama").eval(), []
    in_cache = model.config.num_hidden_layers if way is Decoding.FIXED else 0  # each layer's length, once
    requests = [(i, Request(query, key=i)) for i, query in enumerate((QUERY, OTHER, QUERY))]
    sampling = Sampling(tokens, **options)
    batch = Batch(requests, sampling, torch.device("cpu"), way, StaticCaches(compiles=False))
    batch.keep(kept)
    with torch.no_grad():
        work = host_work(lambda: done.extend(batch.decode_until_one_ends(model)), model)
    assert [len(completion.token_ids) for _, completion in done] == [tokens] * len(kept)
    assert work["read"] == tokens and work["made"] == in_cache


@pytest.mark.parametrize("way", Decoding)
def test_the_index_of_the_last_token_is_one_tensor_on_the_device(way):
    model, seen = tiny_causal_lm("llama").eval(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["logits_to_keep"]), with_kwargs=True)
    requests = [(i, Request(QUERY, key=i)) for i in range(2)]
    batch = Batch(requests, Sampling(5), torch.device("cpu"), way, StaticCaches(compiles=False))
    with torch.no_grad():
        batch.decode_until_one_ends(model)
    assert len(seen) == 5 and all(index is seen[0] for index in seen) and seen[0].tolist() == [-1]
