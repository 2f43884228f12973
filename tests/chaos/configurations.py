"""Configurations and dataset files that nobody would write: read without a traceback, and trained where accepted."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from tests.chaos.children import Failed, in_child
from tests.data.loading import load_prompts
from tests.tiny import tiny_tokenizer
from tests.train.runs import tiny_run
from tether.cli.main import main
from tether.config.load import dump_config, parse_config
from tether.config.schema import RunConfig
from tether.errors import USER_ERRORS

VALUES: dict[str, tuple[Any, ...]] = {
    "model.lora": (None, {}, {"r": 2}, {"r": 2, "target_modules": ["q_proj"]}, {"target_modules": "nothing"}),
    "model.freeze_layers": (0, 1, 2), "model.dtype": ("auto", "float32", "bfloat16"),
    "model.quantization": (None, "4bit"),
    "value.kind": (None, "adapter", "model", "head"), "value.init": (None, "policy", "reward"),
    "value.learning_rate": (None, 1e-3), "value.warmup_steps": (0, 1, 2), "value.detach": (True, False),
    "value.save": (True, False),
    "data.eval_fraction": (0.0, 0.4), "data.chat_template": ("auto", "none", "chatml"),
    "data.system_prompt": (None, "you see the cat"), "data.max_prompt_length": (4, 512), "data.max_samples": (1, 3),
    "data.special_tokens": (True, False),
    "sampling.response_length": (1, 3, 6, 1000), "sampling.temperature": (0.5, 1.0, 2.0),
    "sampling.stop_token": ("eos", None, "the", "nothing"), "sampling.stop_strings": ([], "the", ["at", "e s"], [""]),
    "sampling.batch_size": (1, 3, 64),
    "sampling.num_generations": (1, 2, 4), "sampling.top_p": (0.5, 1.0), "sampling.top_k": (None, 3),
    "sampling.allow_truncated_sampling": (True, False),
    "ppo.kl_coef": (0, 0.05, 1), "ppo.kl_in": ("reward", "loss"), "ppo.kl_estimator": ("k1", "k2", "k3"),
    "ppo.kl_target": (None, 0.5), "ppo.kl_horizon": (1, 100), "ppo.num_ppo_epochs": (1, 2),
    "ppo.num_mini_batches": (1, 2, 3), "ppo.max_approx_kl": (None, 1e-6), "ppo.max_ratio": (None, 1.01),
    "ppo.cliprange": (0.01, 0.2), "ppo.cliprange_high": (None, 0.3), "ppo.dual_clip": (None, 3),
    "ppo.cliprange_value": (None, 0.2), "ppo.vf_coef": (0.1, 1), "ppo.entropy_coef": (0, 0.01),
    "ppo.loss_reduction": ("token_mean", "sequence_mean", "fixed_length"), "ppo.ptx_coef": (0, 1),
    "ppo.gamma": (0.9, 1), "ppo.advantage_estimator": ("gae", "rloo", "grpo", "reinforce_pp"), "ppo.lam": (0, 0.95, 1),
    "ppo.value_lam": (None, 1), "ppo.lam_alpha": (None, 0.05), "ppo.whiten_rewards": (True, False),
    "ppo.whiten_advantages": (None, True, False), "ppo.advantage_clip": (None, 1),
    "ppo.score_norm": (None, "frozen", "running"), "ppo.reward_clip": (None, 1), "ppo.missing_eos_penalty": (None, 1),
    "ppo.missing_eos_score": (None, -1), "ppo.overlong_buffer": (None, 1, 6), "ppo.mask_truncated": (True, False),
    "train.max_steps": (2, None), "train.total_episodes": (None, 9), "train.num_train_epochs": (None, 2),
    "train.rollout_batch_size": (4, 6, 8), "train.micro_batch_size": (None, 1, 2, 4),
    "train.max_tokens_per_micro_batch": (None, 10, 64),
    "train.lr_scheduler_type": (
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
    ),
    "train.lr_scheduler_kwargs": ({}, {"min_lr": 1e-5}, {"num_decay_steps": 1}, {"min_lr": "x"}),
    "train.warmup_ratio": (0.0, 0.5, 1), "train.weight_decay": (0, 0.1), "train.max_grad_norm": (None, 1),
    "train.ema_decay": (None, 0.9), "train.bf16": (True, False), "train.gradient_checkpointing": (True, False),
    "train.offload_idle_roles": (True, False), "train.seed": (0, -1, 2**40), "train.logging_steps": (1, 9),
    "train.log_samples": (0, 3), "train.eval_steps": (None, 1), "train.save_steps": (None, 1),
    "train.save_total_limit": (None, 1), "train.metric_for_best_model": (None, "eval_scores", "eval_kl", "nothing"),
    "train.greater_is_better": (True, False), "train.load_best_model_at_end": (True, False),
    "train.report_to": ("none", "nothing"), "train.run_name": (None, "../../x"), "train.max_bad_batches": (0, 3),
    "train.dry_step": (None, True), "rewards.0.weight": (0, -1, 2), "rewards.0.clip": (None, 1),
    "rewards.0.norm": (None, "auto"),
}  # fmt: skip
"""Values that a key may be given, wrong ones and combinations that are refused among them."""
JUNK = (
    None, True, -1, 0, 1e308, float("nan"), float("inf"), "", "x", "\x00", "\ud800", "../..", [], {}, [[]], {"a": {}},
    "9" * 200, 10**30, ["a"] * 50, "&a", "!!python/object:os.system", "{{ 1 }}",
)  # fmt: skip
SNIPPETS = (
    "&a ", "*a", "!!python/object/apply:os.system ['true']", "\t", "\x00", "\x1b[2J", "---\n", "...\n", "{", "}",
    "[", "]", "'", '"', ": ", "- ", "#", "|\n", ">\n", "? ", "<<: *a\n", "\ufeff", "\u2028", "\x85",
    "%YAML 9\n", "true: 1\n", "ppo: {}\n", "output_dir: x\n",
    " " * 70, "[" * 40, "a: " * 40, "é", "=", "~", "0o17", "1_0", "1e999", "@", "`",
)  # fmt: skip
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "the cat sees", "answer": 4},
    {"prompt": [{"role": "user", "content": "i like the dog"}], "answer": None},
    {"messages": [{"role": "system", "content": "you"}, {"role": "user", "content": "run"}], "answer": [1, {"a": 2}]},
)


def base_config(folder: Path) -> dict[str, Any]:
    """The run that is changed, as data, with its files in ``folder``."""
    return yaml.safe_load(dump_config(tiny_run(folder, sampling__response_length=3)))


def changed(base: dict[str, Any], draw: random.Random, *, most: int = 8) -> dict[str, Any]:
    """The run with up to ``most`` keys set to other values of theirs."""
    data = json.loads(json.dumps(base))
    for key in draw.sample(sorted(VALUES), draw.randint(1, most)):
        set_key(data, key, draw.choice(VALUES[key]))
    return data


def set_key(data: Any, key: str, value: Any) -> None:
    """Sets a dotted key."""
    *path, last = key.split(".")
    for name in path:
        data = data[int(name)] if isinstance(data, list) else data.setdefault(name, {})
    data[last] = value


def fuzzed_text(base: dict[str, Any], draw: random.Random) -> str:
    """Configuration text that was changed in its values, in its structure, or by hand."""
    data = changed(base, draw)
    if draw.random() < 0.5:
        others = ("rewards", "data.prompts", "output_dir", "model", "nothing", "ppo.nothing", "train")
        key = draw.choice([*VALUES, *others])
        if draw.random() < 0.2:
            key += draw.choice((".x", "\x00", "é", " "))
        try:
            set_key(data, key, draw.choice(JUNK))
        except (TypeError, ValueError, IndexError, AttributeError):
            data = draw.choice(JUNK)
    text = yaml.dump(data, allow_unicode=draw.random() < 0.5, default_flow_style=draw.choice((True, False, None)))
    for _ in range(draw.choice((0, 0, 1, 3))):
        place, cut = draw.randint(0, len(text)), draw.choice((0, 0, 1, 9))
        middle = "" if cut else draw.choice((draw.choice(SNIPPETS), text[: draw.randint(0, 200)]))
        text = text[:place] + middle + text[place + cut :]
    return text


def fuzzed_bytes(content: bytes, draw: random.Random) -> bytes:
    """A file with some of it cut, repeated or replaced."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        place, length = draw.randint(0, len(content)), draw.choice((1, 2, 8, 64))
        middle = draw.choice((
            b"", draw.randbytes(length), content[:length], draw.choice(SNIPPETS).encode(errors="surrogatepass"),
            b"\\ud800", b"NaN", b"1e999", b"null", b'{"prompt": 3}\n', b"[" * 2000, b'"' * 3, b"\r\n",
        ))  # fmt: skip
        content = content[:place] + middle + content[place + draw.choice((0, length)) :]
    return content


def dataset_files() -> dict[str, bytes]:
    """Ending of each form of dataset file, with a sound one."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    table, parquet = io.StringIO(), io.BytesIO()
    csv.writer(table).writerows([["prompt", "answer"], ["the cat", "1"], ['i "like"\nyou', "2"]])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["the cat", "you run"], "answer": [1, None]}), parquet)
    return {
        ".jsonl": lines.encode(), ".json": json.dumps(ROWS).encode(), ".csv": table.getvalue().encode(),
        ".parquet": parquet.getvalue(),
    }  # fmt: skip


def run_parsing(folder: Path, count: int, seed: int, tell: Callable[[str], None]) -> str:
    """Reads ``count`` configurations and dataset files, half of each; says how many were accepted and refused.

    Raises:
        Failed: one made anything but a message; it is in the failure's text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = base_config(folder)

    def configurations() -> Counter[str]:
        draw, outcomes = random.Random(seed), Counter[str]()
        for number in range(count // 2):
            text = fuzzed_text(base, draw)
            outcomes["configurations " + _outcome(lambda text=text: parse_config(text), f"{number}: {text!r}")] += 1
        return outcomes

    def files() -> Counter[str]:
        draw, outcomes, tokenizer = random.Random(seed), Counter[str](), tiny_tokenizer()
        sound = dataset_files()
        for number in range(count - count // 2):
            ending = draw.choice(sorted(sound))
            content = fuzzed_bytes(sound[ending], draw)
            path = folder / f"fuzzed{ending}"
            path.write_bytes(content)

            def read(path: Path = path) -> None:
                load_prompts(str(path), tokenizer, key="data.prompts")

            outcomes["files " + _outcome(read, f"{number}: {ending} {content!r}")] += 1
        return outcomes

    outcomes = Counter[str]()
    for what, read in (("configurations", configurations), ("files", files)):
        outcomes += in_child(read)
        tell(f"{outcomes.total()} of {count} read: {what} done")
    return ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items()))


def _outcome(read: Callable[[], Any], what: str) -> str:
    try:
        read()
    except USER_ERRORS as error:
        if not str(error).strip():
            raise Failed(f"{what}: refused without a word") from error
        return "refused"
    except Exception as error:
        raise Failed(f"{what}: {type(error).__name__}: {error}") from error
    return "accepted"


def check_run(folder: Path, data: dict[str, Any]) -> str:
    """Runs a configuration as the command line does; returns ``trained`` or ``refused``.

    Raises:
        Failed: an accepted one did not train all its updates, or a refused one made no message.
    """
    data = data | {"output_dir": str(folder / "out")}
    shutil.rmtree(folder / "out", ignore_errors=True)
    text = yaml.dump(data, allow_unicode=True)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        code = main(["ppo", str(folder / "run.yaml")])
    said = told.getvalue()
    if "Traceback" in said:
        raise Failed(f"a traceback:\n{text}\n{said}")
    if code == 2 and "tether: " in said:
        return "refused"
    if code == 1 and "tether: nothing was trained" in said and data["ppo"]["mask_truncated"]:
        return "refused"  # all answers were cut, which is seen at the end alone
    if code != 0 or not (folder / "out" / "report.html").exists():
        raise Failed(f"exit code {code}:\n{text}\n{said}")
    return "trained"


def run_trainings(folder: Path, count: int, seed: int, tell: Callable[[str], None]) -> str:
    """Tries configurations until ``count`` were accepted and trained; says how many were refused, too.

    Raises:
        Failed: as ``check_run``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base, draw, outcomes = base_config(folder), random.Random(seed), Counter[str]()
    while outcomes["trained"] < count:
        data = changed(base, draw)
        outcomes[in_child(lambda data=data: check_run(folder, data))] += 1
        if outcomes.total() % 25 == 0:
            tell(f"{outcomes['trained']} of {count} configurations trained, {outcomes['refused']} refused")
    return f"{outcomes['trained']} trained to their end, {outcomes['refused']} refused with a message"


def accepted(data: dict[str, Any]) -> RunConfig | None:
    """The configuration that the data is, or None if it is refused."""
    try:
        return parse_config(yaml.dump(data))
    except USER_ERRORS:
        return None
