"""Answers and scores that two processes make together: each does its share, and both know the whole, as one would."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.distributed.harness import alone, together
from tests.rewards.batches import chat_batch
from tests.rewards.services import lengths, local_service
from tests.tiny import EOS, save_tiny, tiny_tokenizer
from tether.config.load import parse_config
from tether.config.schema import RunConfig
from tether.generation.fake import FakeGenerator
from tether.machine.distributed import Dist
from tether.models.stop_strings import continued
from tether.rewards.build import build_rewards
from tether.rewards.early import begun
from tether.rewards.norms import measured, normalised, unmeasured
from tether.train.engines.replicated import Alone
from tether.train.sharing import shared, shared_generator
from tether.types import Request, Sampling

BASE = "model: {path: m}\ndata: {prompts: p}\ntrain: {max_steps: 1}\noutput_dir: o\nrewards:\n"
TURNS = [(f"the cat sees {'a dog ' * i}", f"{'very ' * (7 - i)}nice") for i in range(7)]
FUNCTIONS = '''
def words(prompts, completions): return [len(said[0]["content"].split()) for said in completions]
def letters(prompts, completions): return [len(said[0]["content"]) / 10 for said in completions]
def by_token(prompts, completions, completion_ids): return [[0.5 * i for i in ids] for ids in completion_ids]
'''
SOURCES = """\
- {{type: function, path: {functions}, name: by_token, weight: 0.5}}
- {{type: function, path: {functions}, name: words, norm: auto, weight: 2}}
- {{type: ensemble, name: both, reduce: min, members: [
    {{type: function, path: {functions}, name: letters}},
    {{type: function, path: {functions}, name: words, norm: auto}}]}}
- {{type: model, path: {model}, name: everywhere, batch_size: 2}}
- {{type: model, path: {model}, name: once, processes: one}}
"""


def sources(text: str, dist: Dist) -> Any:
    """The sources of a run as this process has them."""
    config: RunConfig = parse_config(BASE + text)
    options = {"roles": None, "tokenizer": tiny_tokenizer(), "device": "cpu", "shared": partial(shared, dist=dist)}
    return build_rewards(config.rewards, config.reward_names, **options)


def scored(text: str) -> dict[str, Any]:
    """Scores, their parts and those of tokens; and which models this process has."""
    dist, tokenizer = Dist(), tiny_tokenizer()
    batch = replace(chat_batch(tokenizer, TURNS), decode=partial(continued, tokenizer=tokenizer))
    source = sources(text, dist)
    moments = measured(source, batch) if unmeasured(source) else {}
    output = normalised(source, moments).score(batch)
    return {
        "output": (output.scores, output.components, output.token_scores),
        "moments": {name: (each.count, each.mean, each.var) for name, each in moments.items()},
        "has": {part.name: getattr(part.source, "source", part.source) is not None for part in source.parts},
    }


def test_scores_of_two_processes_are_those_of_one(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    text = SOURCES.format(functions=tmp_path / "functions.py", model=save_tiny(tmp_path / "model", num_labels=1))
    first, second = together(scored, text, folder=tmp_path)
    one = alone(scored, text, folder=tmp_path)
    assert first["output"] == second["output"] and first["moments"] == second["moments"] == one["moments"]
    assert first["moments"].keys() == {"words", "both/words"}
    scores, components, token_scores = first["output"]
    assert all(abs(a - b) <= 1e-5 for a, b in zip(scores, one["output"][0], strict=True))
    assert components.keys() == one["output"][1].keys() and len(set(scores)) == len(TURNS)
    for ours, theirs in zip(token_scores, one["output"][2], strict=True):
        assert len(ours) == len(theirs) > 1 and all(abs(a - b) <= 1e-5 for a, b in zip(ours, theirs, strict=True))
    assert first["has"]["once"] and not second["has"]["once"] and second["has"]["everywhere"]


def asked_early(url: str, at_once: int, is_asked: Path) -> list[float]:
    """Scores of a service that is asked about each answer as it comes; nobody wants them before it has been asked.

    Args:
        is_asked: the file that the service then writes.
    """
    batch = chat_batch(tiny_tokenizer(), TURNS)
    text = f"- {{type: http, url: '{url}', batch_size: 1, max_concurrency: {at_once}, columns: []}}"
    asked = begun(sources(text, Dist()), batch)
    for row in range(len(batch)):
        asked.finished([row])
    end = time.monotonic() + 60
    while not is_asked.exists():
        assert time.monotonic() < end, "asked while others were still being written"
        time.sleep(0.01)
    return asked.output().scores


def test_a_service_is_asked_by_all_within_one_cap_and_early(tmp_path):
    def slow(payload: Any) -> Any:
        is_asked.touch()
        end = time.monotonic() + 30  # of a machine that is busy, too
        while service.most_at_work < at_once and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        return lengths(payload)

    for at_once in (3, 1):
        is_asked = tmp_path / f"asked_{at_once}"
        with local_service(slow) as service:
            first, second = together(asked_early, service.url, at_once, is_asked, folder=tmp_path)
        assert first == second == [len(text) for _, text in TURNS]
        asked = Counter(text for payload in service.seen for text in payload["responses"])
        assert asked == Counter(text for _, text in TURNS), "asked once of each"
        assert service.most_at_work == at_once, "one cap for all processes"


def answered() -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Answers of all processes, in their order, and the keys of those that this one was asked for."""
    own: list[int] = []

    def answer(request: Request) -> list[int]:
        own.append(request.key)
        return [*[7 + request.key % 30] * (1 + request.key % 5), EOS]

    dist = Dist()
    generator = shared_generator(FakeGenerator(answer), dist, Alone())
    requests = [Request((1, 2), key) for key in range(11)]
    finished = generator.generate(requests, Sampling(9, 1.0, frozenset({EOS})))
    return [(i, completion.token_ids) for i, completion in finished], own


def test_processes_answer_disjoint_prompts_and_know_all_answers(tmp_path):
    (first, mine), (second, theirs) = together(answered, folder=tmp_path)
    whole, all_keys = alone(answered, folder=tmp_path)
    assert sorted([*mine, *theirs]) == all_keys == list(range(11)) and abs(len(mine) - len(theirs)) == 1
    assert dict(first) == dict(second) == dict(whole)
    assert {i for i, _ in first[: len(mine)]} == set(mine), "its own come first, as they finish"


def stored(folder: Path) -> str:
    """What a process reads that the first one stores, in its own time."""
    dist, file = Dist(), folder / "stored"

    def work() -> str:
        if dist.is_main:
            time.sleep(0.3)
            file.write_text("by the first", encoding="utf-8")
        return file.read_text(encoding="utf-8")

    return dist.main_first(work)


def test_what_the_first_process_stores_is_there_for_the_others(tmp_path):
    assert together(stored, tmp_path, folder=tmp_path) == ["by the first"] * 2
