"""The commands that import and export runs and models: each parses its arguments and makes one call."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from tether.cli.places import local_place, place
from tether.errors import ConfigError


def convert(arguments: Sequence[str]) -> int:
    """Convert a configuration from or to another system: tether convert FILE --to tether"""
    parser = argparse.ArgumentParser(
        "tether convert",
        description="Reads LLaMA-Factory's YAML, verl's YAML or launch, OpenRLHF's launch, TRL's PPO command line, or "
        "Tether's YAML, and writes Tether's YAML or a launch of OpenRLHF or verl. Comments list what was left out.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=place, metavar="FILE", help="YAML, shell script, or a file of arguments")
    parser.add_argument("--to", choices=("tether", "openrlhf", "verl"), required=True, help="format to write")
    parser.add_argument("-o", "--output", type=local_place, required=True, help="file to write")
    given = parser.parse_args(arguments)
    if given.output.exists():
        raise ConfigError(f"--output: {given.output} exists; name a new file")

    from tether.compat.convert import convert as converted

    result = converted(given.file, given.to, given.output)
    try:
        given.output.write_text(result.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {given.output} cannot be written: {error.strerror}") from error
    if given.to != "tether":
        given.output.chmod(given.output.stat().st_mode | 0o111)

    from tether.cli.display import RunDisplay
    from tether.cli.foreign import announce

    with RunDisplay() as display:
        announce(result.translation, display)
        display.message(f"{given.to}: {given.output}")
    return 0


def push(arguments: Sequence[str]) -> int:
    """Upload a saved model to the hub: tether push RUN"""
    parser = argparse.ArgumentParser(
        "tether push",
        description="Uploads the model of a run, a checkpoint or a merged model, with tokenizer and card, to the "
        "Hugging Face hub. The token is that of `hf auth login` or HF_TOKEN. The card of a PPO run shows the start of "
        "up to three held-out prompts with their answers.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=local_place, metavar="RUN", help="output folder of a run, or any model folder")
    parser.add_argument("--to", metavar="OWNER/NAME", help="repository (default: the folder's name)")
    parser.add_argument("--public", action="store_true", help="make a new repository public; private otherwise")
    parser.add_argument(
        "--no_samples", action="store_true", help="leave prompts and answers out of the card that is uploaded"
    )
    given = parser.parse_args(arguments)

    from tether.train import hub

    hub.model_files(given.run)
    if (base := hub.unreachable_base(given.run)) is not None:
        print(f"note: the adapter's base is the local folder {base}: others need that too, or the merged model")
    name = given.to or given.run.absolute().name
    repository = hub.open_repository(name, private=not given.public, key="tether push")
    print(f"pushed: {hub.push(given.run, repository, with_answers=not given.no_samples)}")
    return 0


def chat(arguments: Sequence[str]) -> int:
    """Chat with a trained model next to its start model: tether chat RUN_OR_MODEL"""
    parser = argparse.ArgumentParser(
        "tether chat",
        description="Answers what you type with the model and, side by side, with the model that its run started from. "
        "/new forgets the conversation, /system TEXT sets a system prompt, /quit ends.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", type=place, metavar="RUN_OR_MODEL", help="a run's output folder, a model folder, or a hub id"
    )
    parser.add_argument(
        "--beside", type=place, metavar="MODEL", help="model to compare with (default: the run's start)"
    )
    parser.add_argument("--alone", action="store_true", help="do not compare with another model")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, none if empty (default: the run's)")
    parser.add_argument("--response_length", type=int, help="maximum tokens of an answer (default: the run's, or 256)")
    parser.add_argument("--temperature", type=float, help="0 takes the most likely token (default: the run's, or 1)")
    parser.add_argument("--seed", type=int, default=42, help="sampling seed (default: %(default)s)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the models")
    given = parser.parse_args(arguments)

    from tether.cli.display import RunDisplay
    from tether.cli.talk import talk
    from tether.inference.chat import open_chat

    with RunDisplay() as display:
        display.phase("loading models", 0, 1)
        conversation = open_chat(
            given.model,
            beside=given.beside,
            alone=given.alone,
            system=given.system,
            response_length=given.response_length,
            temperature=given.temperature,
            seed=given.seed,
            trust_remote_code=given.trust_remote_code,
        )
    talk(conversation)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {run.__name__: run for run in (convert, push, chat)}
