"""What a step of decoding asks of the host: on an accelerator, a copy to or from it waits for the device."""

from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import tiny_causal_lm
from tether.generation.batch import Batch, Decoding
from tether.generation.caches import StaticCaches
from tether.types import Request, Sampling

QUERY, OTHER = (7, 20, 13), (9, 8, 30)
KINDS = {torch.ops.aten.lift_fresh: "made", torch.ops.aten._local_scalar_dense: "read"}
READS = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy)


class HostWork(ExitStack):
    """Counts tensors made of Python values (also of a list as an index) and values read from tensors (also by ``if``),
    outside of the model's forward."""

    def __init__(self, model=None):
        super().__init__()
        self.counts, self._is_in_model = Counter(), False
        if model is not None:
            self.enter_context(model.register_forward_pre_hook(lambda *_: self._set_in_model(True)))
            self.enter_context(model.register_forward_hook(lambda *_: self._set_in_model(False)))
        self.enter_context(_Dispatched(self))
        self.enter_context(_Called(self))

    def note(self, kind):
        self.counts[kind] += not self._is_in_model

    def _set_in_model(self, is_in_model):
        self._is_in_model = is_in_model


class _Dispatched(TorchDispatchMode):
    def __init__(self, work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in KINDS:
            self.work.note(KINDS[func.overloadpacket])
        return func(*args, **kwargs or {})


class _Called(TorchFunctionMode):
    def __init__(self, work):
        super().__init__()
        self.work = work

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.work.note("read")
        return func(*args, **kwargs or {})


def test_work_of_the_host_is_counted():
    x, index = torch.zeros(3, 2), torch.tensor([0, 2])
    made = (lambda: torch.tensor([1]), lambda: x[[0, 2]], lambda: x[[0, 2], 0].add_(1))
    read = (x.tolist, x[0, 0].item, x.cpu, lambda: bool(x.any()))
    neither = (lambda: x[index], lambda: x[:, -1:] + 1, lambda: x.new_zeros(3, 1), lambda: x[:, 0].to(torch.int64))
    for calls, wanted in ((made, {"made": 1}), (read, {"read": 1}), (neither, {})):
        for call in calls:
            with HostWork() as work:
                call()
            assert work.counts == wanted


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}], ids=str)
@pytest.mark.parametrize("way", Decoding)
@pytest.mark.parametrize("kept", [[0, 1, 2], [0, 2]], ids=["all rows", "one has ended"])
def test_a_token_is_read_at_once_and_nothing_is_copied_to_the_device_for_it(way, kept, options):
    model = tiny_causal_lm("llama").eval()
    in_cache = model.config.num_hidden_layers if way is Decoding.FIXED else 0  # each layer's length, once
    for tokens in (3, 11):
        requests = [(i, Request(query, key=i)) for i, query in enumerate((QUERY, OTHER, QUERY))]
        sampling = Sampling(tokens, **options)
        batch = Batch(requests, sampling, torch.device("cpu"), way, StaticCaches(compiles=False))
        batch.keep(kept)
        with HostWork(model) as work, torch.no_grad():
            done = batch.decode_until_one_ends(model)
        assert [len(completion.token_ids) for _, completion in done] == [tokens] * len(kept)
        assert work.counts["read"] == tokens and work.counts["made"] == in_cache


@pytest.mark.parametrize("way", Decoding)
def test_the_index_of_the_last_token_is_one_tensor_on_the_device(way):
    model, seen = tiny_causal_lm("llama").eval(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["logits_to_keep"]), with_kwargs=True)
    requests = [(i, Request(QUERY, key=i)) for i in range(2)]
    batch = Batch(requests, Sampling(5), torch.device("cpu"), way, StaticCaches(compiles=False))
    with torch.no_grad():
        batch.decode_until_one_ends(model)
    assert len(seen) == 5 and all(index is seen[0] for index in seen) and seen[0].tolist() == [-1]
