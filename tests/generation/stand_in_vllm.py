"""A stand-in for the package vllm, which need not be installed: what Tether calls, by the same names, answered by the
tiny model itself. It knows no argument that Tether does not pass, starts with weights that are not the policy's, and
refuses to work while it sleeps.
"""

from __future__ import annotations

import copy
import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

SERVED = {"LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"}


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    detokenize: bool
    output_kind: RequestOutputKind


def tokens_input(prompt_token_ids: list[int]) -> dict:
    return {"type": "token", "prompt_token_ids": prompt_token_ids}


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class EngineArgs:
    model: str
    runner: str
    load_format: str
    skip_tokenizer_init: bool
    generation_config: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    enable_sleep_mode: bool
    enforce_eager: bool
    logprobs_mode: str
    disable_log_stats: bool
    distributed_executor_backend: str
    kv_cache_memory_bytes: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16

    def create_model_config(self):
        config = AutoConfig.from_pretrained(self.model)
        if not SERVED.issuperset(config.architectures):
            raise ValueError(f"Model architectures {config.architectures} are not supported for now.")
        config.architecture = config.architectures[0]
        return config


class ModelRegistry:
    """The models that vLLM knows; here their names stand for their classes."""

    @staticmethod
    def resolve_model_cls(architectures: list[str], config) -> tuple[str, str]:
        return architectures[0], architectures[0]


def supports_lora(model: str) -> bool:
    return model != "GPT2LMHeadModel"


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool


@dataclass
class Running:
    """A request at work."""

    prompt: list[int]
    params: SamplingParams
    lora: LoRARequest | None
    noise: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


class LLMEngine:
    """Its own copy of a model, forward after forward over whole texts."""

    def __init__(self, args: EngineArgs) -> None:
        assert args.load_format == "dummy" and args.skip_tokenizer_init and args.logprobs_mode == "processed_logprobs"
        self.args, self.requests, self.aborted, self.widths = args, {}, [], []
        torch.manual_seed(0), np.random.seed(0)  # as vLLM does; callers may not notice
        config = args.create_model_config()
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
        torch.set_num_threads = lambda count: None
        os.environ |= {"LD_PRELOAD": "libgomp.so", "LOCAL_WORLD_SIZE": "1"}
        self.loras, self.asleep, self.levels, self.num_loads, self.prefixes = {}, set(), [], 0, set()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "weights cannot be given to another process"
        engine = cls(args)
        ENGINES.append(engine)
        return engine

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert method == "reload_weights" and "weights" not in self.asleep
        given = dict(kwargs["weights_iterator"])
        own = self.model.state_dict()
        places = {tensor.data_ptr() for name, tensor in own.items() if name in given}
        assert given.keys() <= own.keys() and all(tensor.data_ptr() in places for tensor in own.values())
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)
        self.loras.clear()
        self.num_loads += 1

    def apply_model(self, function) -> list:
        return [function(self.model)]

    def add_lora(self, request: LoRARequest) -> bool:
        assert self.args.enable_lora and len(self.loras) < self.args.max_loras, "one adapter at a time"
        adapted = PeftModel.from_pretrained(copy.deepcopy(self.model), request.lora_path).eval()
        assert adapted.peft_config["default"].r <= self.args.max_lora_rank
        self.loras[request.lora_int_id] = adapted
        return True

    def remove_lora(self, number: int) -> bool:
        return self.loras.pop(number, None) is not None

    def reset_prefix_cache(self) -> bool:
        if not self.requests:
            self.prefixes.clear()
        return not self.requests

    def sleep(self, level: int) -> None:
        assert self.args.enable_sleep_mode and not self.requests
        self.asleep = {"weights", "kv_cache"}
        self.levels.append(level)
        if level == 2:
            with torch.no_grad():
                for tensor in self.model.state_dict().values():
                    tensor.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> bool:
        self.asleep -= set(tags)
        return not self.asleep

    def add_request(self, name: str, prompt: dict, params: SamplingParams, *, lora_request=None) -> str:
        assert not self.asleep and params.ignore_eos and not params.detokenize
        length = len(prompt["prompt_token_ids"]) + params.max_tokens
        if length > self.args.max_model_len:
            raise ValueError(f"{length} tokens are more than max_model_len, {self.args.max_model_len}")
        noise = torch.Generator().manual_seed(params.seed)
        self.requests[name] = Running(prompt["prompt_token_ids"], params, lora_request, noise)
        return name

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.aborted.append(name)
            self.requests.pop(name, None)

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        assert not self.asleep
        assert self.prefixes <= {self.num_loads}, "keys and values of weights that are gone"
        self.prefixes.add(self.num_loads)
        torch.rand(1)  # as vLLM does on a CPU
        names = list(self.requests)[: self.args.max_num_seqs]
        self.widths.append(len(names))
        outputs = (self._written(name, self.requests[name]) for name in names)
        return [output for output in outputs if output is not None]

    def _written(self, name: str, running: Running) -> RequestOutput | None:
        model = self.model if running.lora is None else self.loras[running.lora.lora_int_id]
        logits = model(torch.tensor([running.prompt + running.token_ids])).logits[0, -1].float()
        params = running.params
        logprobs = processed(logits, params)
        if params.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=running.noise))
        running.token_ids.append(token)
        running.logprobs.append({token: Logprob(float(logprobs[token]))})
        finished = token in params.stop_token_ids or len(running.token_ids) == params.max_tokens
        if finished:
            del self.requests[name]
        if params.output_kind is RequestOutputKind.DELTA:
            return RequestOutput(name, [CompletionOutput([token], running.logprobs[-1:])], finished)
        return RequestOutput(name, [CompletionOutput(running.token_ids, running.logprobs)], True) if finished else None


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities of what a token is drawn from."""
    scaled = logits / (params.temperature or 1.0)
    if params.top_k:
        scaled[scaled < scaled.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1.0:
        ordered, order = scaled.softmax(-1).sort(descending=True)
        scaled[order[ordered.cumsum(-1) - ordered >= params.top_p]] = -torch.inf
    return scaled.log_softmax(-1)


ENGINES: list[LLMEngine] = []
"""The engines made since ``install``."""


def install(monkeypatch) -> list[LLMEngine]:
    """Puts the stand-in where ``import vllm`` finds it; returns the engines that will be made."""
    ENGINES.clear()
    contents = {
        "vllm": {
            "__version__": "0.32.0", "__version_tuple__": (0, 32, 0), "EngineArgs": EngineArgs, "LLMEngine": LLMEngine,
            "SamplingParams": SamplingParams,
        },
        "vllm.inputs": {"tokens_input": tokens_input},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {"ModelRegistry": ModelRegistry, "supports_lora": supports_lora},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
    }  # fmt: skip
    for name, names in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    before = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in before.items():
        monkeypatch.setenv(name, value)  # set back to what it was, whatever is done to it
    return ENGINES
