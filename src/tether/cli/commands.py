"""The commands: each parses its arguments, builds what it needs and makes one call.

Heavy modules are imported in the command that needs them. The first line of each docstring is the command's help.
"""

from __future__ import annotations

import argparse
import codecs
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tether.cli import moving
from tether.cli.launched import alike
from tether.cli.places import local_place, place
from tether.config.launched import planned, rank
from tether.errors import ConfigError

if TYPE_CHECKING:
    from tether.cli.display import RunDisplay
    from tether.compat.translation import Translation
    from tether.config.base import Section

INTERRUPTED = 130
N = TypeVar("N", int, float)


def ppo(arguments: Sequence[str]) -> int:
    """Train a policy by PPO: tether ppo RUN.yaml"""
    from tether.config.schema import RunConfig

    if _wants_help(arguments):
        return _config_help("ppo", RunConfig)
    config, translation = _configured("ppo", RunConfig, arguments)

    from tether.cli.foreign import announce, plot
    from tether.train.run import train_policy

    with _display_of_first() as display:
        announce(translation, display)
        result = train_policy(config, display=display)
        if rank() == 0:
            plot(translation, result.output_dir, display)
        return _ended(result.interrupted, f"policy: {result.output_dir}\nreport: {result.report}", display)


def plan(arguments: Sequence[str]) -> int:
    """Show what a run would do, train nothing: tether plan RUN.yaml [--processes=N] [--config]"""
    from tether.config.schema import RunConfig

    if _wants_help(arguments):
        own = ["--processes=N  plan for N processes, one per device", "--config       show every key, also defaults"]
        return _config_help("plan", RunConfig, "".join(f"  {option}\n" for option in own))
    parser = argparse.ArgumentParser("tether plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", type=_positive, default=1, metavar="N")
    parser.add_argument("--config", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    file, overrides = run_arguments("tether plan", rest)

    from tether.compat.load import load_any

    with planned(options.processes):  # batch sizes in LLaMA-Factory's files are per process
        config, translation = load_any(file, overrides, RunConfig, "ppo")

    from tether.cli.display import RunDisplay
    from tether.cli.foreign import announce
    from tether.cli.plan import show_plan
    from tether.train.plan import plan as plan_of

    with RunDisplay() as display:
        announce(translation, display)
        show_plan(plan_of(config, options.processes), display, whole=options.config)
    return 0


def sft(arguments: Sequence[str]) -> int:
    """Fine-tune a model on demonstrations: tether sft RUN.yaml"""
    from tether.config.sft_stage import SftStageConfig

    if _wants_help(arguments):
        return _config_help("sft", SftStageConfig)
    config, translation = _configured("sft", SftStageConfig, arguments)

    from tether.cli.foreign import announce, plot
    from tether.pipeline import run_sft

    with _display_of_first() as display:
        announce(translation, display)
        result = run_sft(config, display)
        if rank() == 0:
            plot(translation, result.path, display)
        return _ended(result.interrupted, f"policy: {result.path}", display)


def reward(arguments: Sequence[str]) -> int:
    """Train a reward model on preference pairs: tether reward RUN.yaml"""
    from tether.config.reward_stage import RewardStageConfig

    if _wants_help(arguments):
        return _config_help("reward", RewardStageConfig)
    config, translation = _configured("reward", RewardStageConfig, arguments)

    from tether.cli.foreign import announce, plot
    from tether.pipeline import run_reward

    with _display_of_first() as display:
        announce(translation, display)
        result = run_reward(config, display)
        if rank() == 0:
            plot(translation, result.path, display)
        return _ended(result.interrupted, f"reward model: {result.path}", display)


def pipeline(arguments: Sequence[str]) -> int:
    """SFT, reward model and PPO from one file: tether pipeline RUN.yaml"""
    from tether.config.pipeline import PipelineConfig, load_pipeline

    if _wants_help(arguments):
        return _config_help("pipeline", PipelineConfig)
    with alike():
        file, overrides = run_arguments("tether pipeline", arguments)

        from tether.compat.load import check_pipeline

        check_pipeline(file)
        config = load_pipeline(file, overrides)

    from tether.pipeline import run_pipeline

    with _display_of_first() as display:
        result = run_pipeline(config, display=display)
        if result.interrupted is not None:
            display.message(f"stopped by {result.interrupted}; the same command continues from here")
            return INTERRUPTED
        for name, folder in result.folders.items():
            display.message(f"{name}: {folder}")
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Answer held-out prompts and score them: tether evaluate RUN"""
    about = "Answers prompts with a run's policy and scores the answers with the run's reward sources."
    parser = _parser("evaluate", about)
    parser.add_argument("run", type=local_place, help="output folder of a run, or a checkpoint in it")
    parser.add_argument("--prompts", type=place, help="prompts to answer (default: the run's held-out prompts)")
    _reads_as(parser, "--prompts", default=None)
    parser.add_argument("-o", "--output", type=local_place, help="JSONL file for answers and scores")
    parser.add_argument("--metrics", type=local_place, help="JSON file for the metrics, with what was measured")
    given = parser.parse_args(arguments)

    from tether.cli.display import RunDisplay
    from tether.inference.evaluate import evaluate_path

    with RunDisplay() as display:
        options = _how_read(given) | {"output": given.output, "metrics": given.metrics}
        result = evaluate_path(given.run, given.prompts, **options, display=display)
        display.samples(result.samples)
        display.table("evaluation", ["metric", "value"], list(result.metrics.items()))
    return 0


def generate(arguments: Sequence[str]) -> int:
    """Answer prompts: tether generate RUN_OR_MODEL --prompts FILE"""
    parser = _parser("generate", "Answers prompts with a run's policy or any model; one JSON line per answer.")
    parser.add_argument("model", type=place, help="output folder of a run, a model or adapter folder, or a hub id")
    parser.add_argument("--prompts", type=place, required=True, help="prompts to answer")
    _reads_as(parser, "--prompts", default="train")
    parser.add_argument(
        "-o", "--output", type=local_place, help="JSONL file for the answers (default: standard output)"
    )
    parser.add_argument(
        "--response_length", type=_positive, help="maximum tokens of an answer (default: the run's, or 256)"
    )
    parser.add_argument(
        "--max_prompt_length",
        type=_positive,
        help="longer prompts are dropped (default: the run's, or what the model's positions leave, at most 2048)",
    )
    parser.add_argument(
        "--temperature", type=_at_least_0, help="0 takes the most likely token (default: the run's, or 1)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt, none if empty (default: the run's)")
    parser.add_argument("--seed", type=int, default=42, help="sampling seed (default: %(default)s)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    given = parser.parse_args(arguments)

    from rich.console import Console

    from tether.cli.display import RunDisplay
    from tether.inference.generate import generate_path
    from tether.report.text import json_line

    with RunDisplay(Console(stderr=True)) as display:
        rows = generate_path(
            given.model,
            given.prompts,
            **_how_read(given),
            output=given.output,
            response_length=given.response_length,
            max_prompt_length=given.max_prompt_length,
            temperature=given.temperature,
            system=given.system,
            seed=given.seed,
            trust_remote_code=given.trust_remote_code,
            display=display,
        )
    if given.output is None:
        as_ascii = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
        for row in rows:
            print(json_line(row, as_ascii=as_ascii))
    return 0


def score(arguments: Sequence[str]) -> int:
    """Score pairs or answers with reward sources: tether score SOURCE.yaml FILE"""
    parser = _parser(
        "score",
        "Scores a file of preference pairs, or of prompts with answers, and shows how well the sources tell them apart "
        "and what models among them read. Further options override keys of SOURCE.yaml: --rewards.0.path=DIR.",
    )
    parser.add_argument("source", metavar="SOURCE.yaml", help="reward sources (the key rewards), or a run's file")
    parser.add_argument(
        "file", type=place, metavar="FILE", help="chosen and rejected, or response, with prompt in each row"
    )
    _reads_as(parser, "FILE", default="train")
    parser.add_argument("-o", "--output", type=local_place, help="JSONL file for the rows with their scores")
    parser.add_argument("--metrics", type=local_place, help="JSON file for the numbers shown, with what was measured")
    given, overrides = parser.parse_known_args(arguments)

    from tether.config.source import load_sources

    config = load_sources(given.source, overrides)

    from tether.cli.display import RunDisplay
    from tether.inference.scoring import score_file

    with RunDisplay() as display:
        options = _how_read(given) | {"output": given.output, "metrics": given.metrics}
        scored = score_file(config, given.file, **options, display=display)
        for text in scored.seen:
            display.message(text)
        for table in scored.tables:
            display.table(table.title, table.columns, table.rows)
    return 0


def serve_reward(arguments: Sequence[str]) -> int:
    """Serve reward sources over HTTP: tether serve-reward SOURCE.yaml"""
    parser = _parser(
        "serve-reward",
        "Answers requests for scores until it is interrupted; docs/rewards.md describes the protocol. Further options "
        "override keys of SOURCE.yaml: --rewards.0.path=DIR.",
    )
    parser.add_argument("source", metavar="SOURCE.yaml", help="reward sources (the key rewards), or a run's file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    given, overrides = parser.parse_known_args(arguments)

    from tether.config.source import load_sources

    config = load_sources(given.source, overrides)

    from tether.cli.display import RunDisplay
    from tether.inference.judges import serve_rewards

    with RunDisplay() as display:
        reason = serve_rewards(config, host=given.host, port=given.port, display=display)
        display.message(f"stopped by {reason}")
    return 0


def merge(arguments: Sequence[str]) -> int:
    """Merge an adapter into its base model: tether merge ADAPTER -o DIR"""
    parser = _parser("merge", "Merges a PEFT adapter into its base model and writes a plain model folder.")
    parser.add_argument("adapter", type=place, help="adapter folder, for example a run's output folder")
    parser.add_argument("-o", "--output", type=local_place, required=True, help="folder for the merged model")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the base")
    given = parser.parse_args(arguments)

    from tether.models.saving import merge_adapter
    from tether.report.card import write_card

    merge_adapter(
        given.adapter,
        given.output,
        trust_remote_code=given.trust_remote_code,
        also=lambda folder: write_card(folder, Path(given.adapter)),
    )
    print(f"merged model: {given.output}")
    return 0


def report(arguments: Sequence[str]) -> int:
    """Write a run's report.html again: tether report RUN"""
    parser = _parser("report", "Writes report.html from what a run has logged so far; it may still be running.")
    parser.add_argument("run", type=local_place, help="output folder of a run")
    given = parser.parse_args(arguments)

    from tether.report.html import write_report

    try:
        file = write_report(given.run)
    except OSError as error:
        raise ConfigError(f"{given.run}: report.html cannot be written there: {error.strerror}") from error
    print(f"report: {file}")
    return 0


def demo(arguments: Sequence[str]) -> int:
    """Reward model, PPO and evaluation on a real 135M model: tether demo"""
    parser = _parser("demo", "The whole pipeline on a small real model; `make demo` installs what it needs.")
    parser.add_argument(
        "-o", "--output", type=local_place, default=Path("runs/demo"), help="folder (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed (default: %(default)s)")
    given = parser.parse_args(arguments)

    from tether.cli.display import RunDisplay
    from tether.demo.run import run_demo

    with RunDisplay() as display:
        result = run_demo(given.output, seed=given.seed, display=display)
    return INTERRUPTED if result is None else 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    run.__name__.replace("_", "-"): run
    for run in (ppo, sft, reward, pipeline, plan, score, serve_reward, evaluate, generate, merge, report, demo)
} | moving.COMMANDS


def run_arguments(command: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The configuration file and the overrides of a command line; ``--resume`` and ``--overwrite`` need no value.

    An override may omit the dashes: ``train.seed=1``.

    Raises:
        ConfigError: not exactly one file is named, or an option is malformed.
    """
    shortcuts = {"--resume": "--resume=true", "--overwrite": "--overwrite_output_dir=true"}
    files: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in shortcuts:
            overrides.append(shortcuts[argument])
        elif argument.startswith("--"):
            value = next(rest, None) if "=" not in argument else None
            overrides += [argument] if value is None else [argument, value]
        elif argument.startswith("-"):
            raise ConfigError(f"{argument}: unknown option; overrides start with two dashes, as in --train.seed=1")
        elif re.match(r"[A-Za-z_][\w.]*=", argument) and not Path(argument).exists():
            overrides.append(f"--{argument}")
        else:
            files.append(argument)
    if len(files) != 1:
        got = " and ".join(files) or "none"
        raise ConfigError(
            f"{command} takes one configuration file, got {got}; values follow their key, as in --resume=DIR"
        )
    return files[0], overrides


def _ended(interrupted: str | None, made: str, display: RunDisplay) -> int:
    """Shows what a run produced; returns the exit code."""
    if interrupted is not None:
        display.message(f"stopped by {interrupted}; the same command with --resume continues from here")
        return INTERRUPTED
    display.message(made)
    return 0


def _wants_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def _configured(command: str, section: type[Section], arguments: Sequence[str]) -> tuple[Any, Translation | None]:
    """The configuration of a command, possibly launched in several processes, and its translation if it is another
    system's."""
    with alike():
        file, overrides = run_arguments(f"tether {command}", arguments)

        from tether.compat.load import load_any

        return load_any(file, overrides, section, command)


def _display_of_first() -> RunDisplay:
    """A display on which only the first of several launched processes shows anything."""
    from rich.console import Console

    from tether.cli.display import RunDisplay

    return RunDisplay(Console(quiet=rank() > 0))


def _config_help(command: str, section: type[Section], options: str | None = None) -> int:
    from tether.cli.help import config_help

    if rank() == 0:
        does = COMMANDS[command].__doc__.partition(": tether ")[0] + "."
        print(config_help(command, does, section, options), end="")
    return 0


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(f"tether {command}", description=description, allow_abbrev=False)


def _reads_as(parser: argparse.ArgumentParser, source: str, *, default: str | None) -> None:
    """Adds the options for how ``source`` is read; without a default split, it may be the run's."""
    told = default or "train, or as in the run"
    parser.add_argument("--split", default=default, help=f"split to read where {source} has several (default: {told})")
    parser.add_argument("--subset", help="subset to read where a hub dataset or a folder has several")
    parser.add_argument(
        "--columns",
        type=_columns,
        metavar="NAMES",
        help="columns that are called something else, as data.columns: '{prompt: question}'",
    )


def _how_read(given: argparse.Namespace) -> dict[str, Any]:
    """Values of these options, as arguments."""
    return {"split": given.split, "subset": given.subset, "columns": given.columns}


def _columns(word: str) -> dict[str, str]:
    """Names of columns by ours; argparse shows the error after the option's name."""
    from tether.config import text
    from tether.config.chat import check_columns

    try:
        names = text.parse(word).data
    except text.TextError as error:
        raise argparse.ArgumentTypeError(f"got {word}, which is not YAML: {error}") from error
    check_columns(names)
    return names


def _positive(word: str) -> int:
    return _number(word, int, lambda number: number > 0, "a whole number above 0")


def _port(word: str) -> int:
    return _number(word, int, lambda number: 0 <= number < 2**16, f"a number from 0 to {2**16 - 1}")


def _at_least_0(word: str) -> float:
    return _number(word, float, lambda number: 0 <= number < math.inf, "a number of at least 0")


def _number(word: str, kind: Callable[[str], N], fits: Callable[[N], bool], wanted: str) -> N:
    """The number that a word stands for; argparse shows the error after the option's name."""
    try:
        number = kind(word)
    except ValueError:
        number = None
    if number is None or not fits(number):
        raise argparse.ArgumentTypeError(f"got {word}, wanted {wanted}")
    return number
