"""The ``tether`` command: finds the command, runs it, and turns the outcome into an exit code.

    0    done
    1    failure: a message; with --debug (or TETHER_DEBUG=1) also the traceback
    2    a mistake that the user can fix: one message with the key, file or row, what was got and what is expected
    130  interrupted, with the state saved

Nothing heavy is imported before a command needs it, so that help and configuration errors appear at once.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from tether import __version__
from tether.cli import commands
from tether.cli.environment import refused_variable
from tether.cli.launched import LAUNCHED, alike, check_command, end, signed, speaks, without_local_rank
from tether.cli.quiet import quieten
from tether.config.launched import check_numbers
from tether.errors import USER_ERRORS, ConfigError, TetherError

TRAINING = (*LAUNCHED, "demo")
"""The commands that train."""

_HELP = """\
usage: tether COMMAND …

PPO-RLHF for Hugging Face language models.

{commands}

tether COMMAND --help shows more. Options of every command:
  --debug     full traceback on failure, and all messages of the libraries
  --version   version of Tether

exit codes: 0 done, 1 failed, 2 invalid input, 130 interrupted with the state
saved
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Args:
        argv: arguments after the program's name. Default: those of this process.
    """
    try:
        check_numbers()  # below, they say which process this is
    except ConfigError as error:
        print(f"tether: {error}", file=sys.stderr)
        return 2
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("TETHER_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that its encoding lacks are shown as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = without_local_rank(arguments)
        return _run(arguments, debug=debug)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(_trains(arguments))  # for other commands, the reader has seen enough
    except KeyboardInterrupt as error:
        before = " before the state could be saved" if _trains(arguments) else ""
        print(signed(f"tether: interrupted{before}"), file=sys.stderr)
        return end(1, error)
    except Exception as error:
        if debug:
            traceback.print_exc()
        error = refused_variable(error) or error
        from tether.report.text import visible  # a reward function's error can contain text of the model

        if speaks(error):
            print(visible(signed(_message(error, debug=debug))), file=sys.stderr)
        return end(2 if isinstance(error, USER_ERRORS) else 1, error)


def _run(arguments: list[str], *, debug: bool) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_HELP.format(commands=_command_list()), end="")
        return 0 if arguments else 2
    if name == "--version":
        print(f"tether {__version__}")
        return 0
    if name not in commands.COMMANDS:
        close = difflib.get_close_matches(name, commands.COMMANDS, n=1)
        hint = f"did you mean `tether {close[0]}`?" if close else f"wanted one of {', '.join(commands.COMMANDS)}"
        raise ConfigError(f"there is no command {name}; {hint}")
    with alike():
        check_command(name)
    quieten(debug=debug)
    return commands.COMMANDS[name](rest)


def _trains(arguments: Sequence[str]) -> bool:
    return len(arguments) > 0 and arguments[0] in TRAINING and not {"-h", "--help"} & {*arguments}


def _command_list() -> str:
    return "\n".join(f"  {name:<12}  {(run.__doc__ or '').splitlines()[0]}" for name, run in commands.COMMANDS.items())


def _message(error: Exception, *, debug: bool) -> str:
    if isinstance(error, TetherError):
        return "\n".join(f"tether: {text}" for text in (error, *getattr(error, "__notes__", ())))
    hint = "" if debug else "\ntether: run again with --debug for the traceback"
    return f"tether: {type(error).__name__}: {error}{hint}"
