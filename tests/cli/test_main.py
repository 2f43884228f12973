"""The command line: what is parsed, what is called, and what becomes the exit code."""

import argparse
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tether import __version__, errors
from tether.cli import commands, quiet
from tether.cli.environment import refused_variable
from tether.cli.main import main
from tether.cli.places import local_place
from tether.cli.places import place as any_place

RUN = """\
model: {path: some/model}
rewards: [{type: function, path: judges.py, name: brevity}]
data: {prompts: prompts.jsonl}
train: {max_steps: 2}
output_dir: runs/first
"""


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was(monkeypatch):
    """``quieten`` sets the process up for a command; here that would outlive the test."""
    for name in ("TETHER_DEBUG", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


def python(*arguments, **kwargs):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **kwargs)


class TestLocalRank:
    """deepspeed and torch.distributed.launch add it to the arguments, before or behind those of the program."""

    @pytest.mark.parametrize("words", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"]])
    def test_is_what_the_environment_says(self, file, monkeypatch, words):
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(commands, "COMMANDS", {"ppo": (ppo := Mock(return_value=0))})
        assert main([*words, "ppo", file, "train.seed=1"]) == main(["ppo", file, "train.seed=1", *words]) == 0
        assert [call.args for call in ppo.call_args_list] == 2 * [([file, "train.seed=1"],)]

    @pytest.mark.parametrize("word", ["--local_rank=0", "--local_rank=-1"])
    def test_of_a_single_process_needs_no_launcher(self, file, monkeypatch, word):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(commands, "COMMANDS", {"ppo": Mock(return_value=0)})
        assert main(["ppo", file, word]) == 0

    @pytest.mark.parametrize(("said", "told"), [(None, "not set"), ("0", "0")])
    def test_that_the_environment_does_not_know_is_told(self, file, monkeypatch, capsys, said, told):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if said is not None:
            monkeypatch.setenv("LOCAL_RANK", said)
        assert main(["ppo", file, "--local_rank=1"]) == 2
        assert f"--local_rank: got 1, but LOCAL_RANK is {told}: launchers set both" in capsys.readouterr().err


class TestPlaces:
    @pytest.mark.parametrize(
        "words",
        [
            "evaluate LONG", "evaluate run --prompts LONG", "evaluate run -o LONG", "generate LONG --prompts p",
            "generate m --prompts LONG", "score source.yaml LONG", "merge LONG -o o", "merge m -o LONG", "report LONG",
            "push LONG", "chat LONG", "convert run.yaml --to verl -o LONG",
        ],
    )  # fmt: skip
    def test_a_name_that_no_file_can_have_is_one_message(self, capsys, words):
        assert main(words.replace("LONG", "a" * 300).split()) == 2
        assert f"{'a' * 100}… cannot be accessed: File name too long" in capsys.readouterr().err

    def test_what_is_written_may_go_through_a_link_to_nothing(self, tmp_path, monkeypatch):
        (tmp_path / "link").symlink_to("made.jsonl")
        monkeypatch.chdir(tmp_path)
        assert local_place("link") == Path("link")
        with pytest.raises(argparse.ArgumentTypeError, match=r"^link is a link to made\.jsonl, which does not exist$"):
            any_place("link")


class TestHelp:
    def test_names_every_command(self, capsys):
        assert main(["--help"]) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {name} " in shown for name in commands.COMMANDS)

    def test_is_shown_in_any_encoding(self):
        shown = python("-m", "tether", "ppo", "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith("usage: tether ppo") and "\\u03c0" in shown.stdout

    def test_is_shown_to_who_asks_for_nothing(self, capsys):
        assert main([]) == 2
        assert capsys.readouterr().out.startswith("usage: tether")

    @pytest.mark.parametrize("name", commands.COMMANDS)
    def test_of_every_command_fits_80_columns(self, name, capsys):
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: tether {name}")
        assert max(map(len, shown.splitlines())) <= 80

    @pytest.mark.parametrize("name", ["ppo", "plan", "sft", "reward", "pipeline"])
    def test_of_a_command_that_reads_a_file_says_what_it_does(self, name, capsys):
        main([name, "--help"])
        summary = commands.COMMANDS[name].__doc__.split(": tether")[0]
        assert capsys.readouterr().out.split("\n\n")[1] == f"{summary}."

    def test_of_ppo_documents_a_key_with_its_default(self, capsys):
        main(["ppo", "--help"])
        assert (
            "  --ppo.cliprange  number above 0 and below 1; default 0.2\n"
            "      Policy ratio is clipped to [1 − cliprange, 1 + cliprange]. Source:\n"
        ) in capsys.readouterr().out

    def test_shortcuts_are_shown_where_they_exist(self, capsys):
        main(["ppo", "--help"])
        assert "short for --resume=true" in capsys.readouterr().out
        main(["pipeline", "--help"])
        assert "short for --resume" not in capsys.readouterr().out
        main(["plan", "--help"])
        shown = capsys.readouterr().out
        assert "\n  --processes=N  plan for N processes" in shown and "short for --resume" not in shown

    def test_the_version_is_the_packages(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"tether {__version__}\n"


class TestProcess:
    def test_help_imports_nothing_heavy(self):
        heavy = {"torch", "transformers", "pydantic", "yaml", "rich", "numpy"}
        code = "import sys; from tether.cli.main import main; main(['--help']); print(*sys.modules)"
        assert not heavy & set(python("-c", code).stdout.split())

    def test_a_mistake_in_a_file_is_found_without_torch(self, file):
        code = (
            "import sys; from tether.cli.main import main; "
            f"print(main(['ppo', {file!r}, '--ppo.lam=2']), 'torch' in sys.modules)"
        )
        ran = python("-c", code)
        assert ran.stdout == "2 False\n"
        assert ran.stderr == f"tether: {file}, --ppo.lam: got 2, wanted a number from 0 to 1\n"

    def test_the_package_runs_as_a_module(self):
        ran = python("-m", "tether", "nonsense")
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr.startswith("tether: there is no command nonsense; wanted one of ppo, ")

    def test_a_reader_that_leaves_early_is_no_error(self):
        command = [sys.executable, "-m", "tether", "ppo", "--help"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


class TestExitCode:
    @pytest.fixture
    def ending_with(self, monkeypatch):
        """Makes ``tether ppo`` end with an error."""

        def set_up(error):
            def run(arguments):
                raise error

            monkeypatch.setitem(commands.COMMANDS, "ppo", run)

        return set_up

    @pytest.mark.parametrize("kind", errors.USER_ERRORS)
    def test_a_users_mistake_is_2_and_one_message(self, kind, ending_with, capsys):
        ending_with(kind("row 3 has no prompt"))
        assert main(["ppo"]) == 2
        assert capsys.readouterr().err == "tether: row 3 has no prompt\n"

    @pytest.mark.parametrize("kind", [errors.RewardError, errors.GenerationError, errors.TrainingError])
    def test_a_run_that_could_not_go_on_is_1(self, kind, ending_with, capsys):
        ending_with(kind("the loss is not finite"))
        assert main(["ppo"]) == 1
        assert capsys.readouterr().err == "tether: the loss is not finite\n"

    def test_what_a_model_wrote_cannot_act_on_the_terminal(self, ending_with, capsys):
        ending_with(errors.RewardError("reward f raised ValueError: \x1b]0;title\x07 \u202e"))
        assert main(["ppo"]) == 1
        assert capsys.readouterr().err == "tether: reward f raised ValueError: \\x1b]0;title\\x07 \\u202e\n"

    def test_anything_else_is_1_and_names_its_kind(self, ending_with, capsys):
        ending_with(ValueError("odd"))
        assert main(["ppo"]) == 1
        assert (
            capsys.readouterr().err == "tether: ValueError: odd\ntether: run again with --debug for the traceback\n"
        )

    @pytest.mark.parametrize("how", ["argument", "environment"])
    def test_debugging_shows_the_traceback(self, how, ending_with, capsys, monkeypatch):
        ending_with(ValueError("odd"))
        if how == "environment":
            monkeypatch.setenv("TETHER_DEBUG", "1")
        assert main(["ppo", "--debug"] if how == "argument" else ["ppo"]) == 1
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback")
        assert shown.endswith("tether: ValueError: odd\n")

    def test_an_interrupt_that_saved_nothing_is_not_130(self, ending_with, capsys):
        ending_with(KeyboardInterrupt())
        assert main(["ppo"]) == 1
        assert "before the state could be saved" in capsys.readouterr().err

    def test_a_command_that_has_no_state_does_not_speak_of_it(self, monkeypatch, capsys):
        monkeypatch.setitem(commands.COMMANDS, "generate", lambda arguments: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert main(["generate"]) == 1
        assert capsys.readouterr().err.endswith("tether: interrupted\n")

    @pytest.mark.parametrize(("ended", "code"), [(None, 0), (3, 3), ("message", 1)])
    def test_an_exit_keeps_its_code(self, ended, code, ending_with):
        ending_with(SystemExit(ended))
        assert main(["ppo"]) == code

    @pytest.mark.parametrize(
        ("arguments", "code"), [(["ppo"], 1), (["demo"], 1), (["plan"], 0), (["ppo", "--help"], 0)]
    )
    def test_a_reader_that_goes_away_is_a_failure_of_what_trains_alone(self, arguments, code):
        ends = (
            "import sys\nfrom tether.cli import commands, main\n"
            "def end(arguments): raise BrokenPipeError\n"
            "commands.COMMANDS[sys.argv[1]] = end\n"
            "sys.exit(main.main())\n"
        )
        assert python("-c", ends, *arguments).returncode == code

    def test_an_argument_that_is_missing_is_2(self, capsys):
        assert main(["merge", "adapter"]) == 2
        assert "-o/--output" in capsys.readouterr().err

    def test_a_command_with_a_slip_is_2_and_says_the_nearest(self, capsys):
        assert main(["pppo"]) == 2
        assert "did you mean `tether ppo`?" in capsys.readouterr().err


class TestEnvironment:
    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("HF_HUB_DOWNLOAD_TIMEOUT", "soon", "'soon', which huggingface_hub refuses (invalid literal for int()"),
            ("TORCH_LOGS", "+nonsense,++", "'+nonsense,++', which torch refuses (Invalid log settings: +nonsense,++,"),
        ],
    )
    def test_a_variable_that_a_library_refuses_is_named(self, file, name, value, words):
        shown = python("-m", "tether", "plan", file, env={**os.environ, name: value})
        assert shown.returncode == 2 and shown.stdout == ""
        assert shown.stderr.startswith(f"tether: the environment variable {name}: got {words}"), shown.stderr
        assert shown.stderr.endswith("): correct or unset it\n") and shown.stderr.count("\n") == 1

    def test_a_variable_that_accelerate_refuses_as_a_run_begins_is_named(self, file):
        shown = python("-m", "tether", "ppo", file, env={**os.environ, "ACCELERATE_DYNAMO_BACKEND": "abc"})
        told = "got 'abc', which accelerate refuses ('ABC' is not a valid DynamoBackend): correct or unset it"
        assert shown.stderr == f"tether: the environment variable ACCELERATE_DYNAMO_BACKEND: {told}\n"
        assert (shown.returncode, shown.stdout) == (2, "")

    @pytest.mark.parametrize(
        ("module", "function", "text", "is_named"),
        [
            ("accelerate.accelerator", "__init__", "'SOON' is not a valid DynamoBackend", True),
            ("accelerate.accelerator", "prepare", "'SOON' is not a valid DynamoBackend", False),
            ("torch.distributed", "<module>", "invalid literal: 'soon'", True),
            ("torch.distributed", "mode", "TORCH_OF_TEST must be OFF or INFO", True),
            ("torch.distributed", "mode", "invalid literal: 'soon'", False),
            ("torch.distributed", "from_env", "invalid truth value soon", True),
            ("torch.distributed", "from_env", "invalid truth value sooner", False),
            ("torch.distributed", "<module>", "invalid literal: 'later'", False),
            ("judges", "<module>", "invalid literal: 'soon'", False),
            ("judges", "score", "TORCH_OF_TEST must be OFF or INFO", False),
        ],
    )
    def test_it_is_one_that_the_library_names_or_whose_value_it_quotes_as_it_is_imported(
        self, monkeypatch, module, function, text, is_named
    ):
        monkeypatch.setenv("TORCH_OF_TEST", "soon")
        call, scope = f"raise ValueError({text!r})", {"__name__": module}
        with pytest.raises(ValueError, match=text) as caught:
            exec(call if function == "<module>" else f"def {function}():\n    {call}", scope)
            scope[function]()
        found = refused_variable(caught.value)
        assert (found is not None) == is_named
        told = f"the environment variable TORCH_OF_TEST: got 'soon', which {module.partition('.')[0]} refuses"
        assert not is_named or told in str(found)

    def test_neither_what_memory_could_be_saved_by_nor_a_token_is_at_fault(self, monkeypatch):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        for error in (RuntimeError("out of memory: try PYTORCH_ALLOC_CONF"), ValueError("HF_TOKEN 'hf_secret'")):
            with pytest.raises(type(error)) as caught:
                exec("raise error", {"__name__": "huggingface_hub", "error": error})
            assert refused_variable(caught.value) is None


class TestRunArguments:
    @pytest.mark.parametrize(
        ("arguments", "overrides"),
        [
            (["run.yaml"], []),
            (["run.yaml", "--ppo.lam=1"], ["--ppo.lam=1"]),
            (["--ppo.lam", "1", "run.yaml"], ["--ppo.lam", "1"]),
            (["run.yaml", "--train.seed", "-1"], ["--train.seed", "-1"]),
            (["--resume", "run.yaml"], ["--resume=true"]),
            (["run.yaml", "--resume=runs/x"], ["--resume=runs/x"]),
            (["--overwrite", "run.yaml"], ["--overwrite_output_dir=true"]),
            (["run.yaml", "--train.seed"], ["--train.seed"]),
        ],
    )
    def test_one_file_and_the_overrides(self, arguments, overrides):
        assert commands.run_arguments("tether ppo", arguments) == ("run.yaml", overrides)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "takes one configuration file, got none"),
            (["a.yaml", "b.yaml"], "got a.yaml and b.yaml"),
            (["a.yaml", "--resume", "runs/x"], "as in --resume=DIR"),
            (["a.yaml", "-x"], "-x: unknown option"),
        ],
    )
    def test_anything_else_is_refused(self, arguments, words):
        with pytest.raises(errors.ConfigError, match=words):
            commands.run_arguments("tether ppo", arguments)


class TestCalls:
    @pytest.fixture
    def trained(self, monkeypatch):
        """Replaces training; the list of configurations that it was called with, and its result."""
        from tether.train import run

        class Trained:
            def __init__(self):
                self.configs, self.interrupted = [], None

            def __call__(self, config, *, display):
                self.configs.append(config)
                return run.RunResult(config.output_dir, [], [], config.output_dir / "report.html", self.interrupted)

        trained = Trained()
        monkeypatch.setattr(run, "train_policy", trained)
        return trained

    def test_ppo_trains_what_file_and_overrides_say(self, file, trained, capsys):
        assert main(["ppo", file, "--ppo.kl_coef", "0.02", "--overwrite"]) == 0
        (config,) = trained.configs
        assert (config.ppo.kl_coef, config.overwrite_output_dir) == (0.02, True)
        assert str(Path("runs/first/report.html")) in capsys.readouterr().out

    def test_an_interrupted_run_ends_with_130_and_says_how_to_go_on(self, file, trained, capsys):
        trained.interrupted = "SIGTERM"
        assert main(["ppo", file]) == 130
        assert "stopped by SIGTERM; the same command with --resume" in capsys.readouterr().out

    def test_merge_and_report_call_what_they_name(self, monkeypatch, capsys):
        calls = []
        monkeypatch.setattr(
            "tether.models.saving.merge_adapter",
            lambda *given, also, trust_remote_code: calls.append((*given, trust_remote_code)),
        )
        monkeypatch.setattr("tether.report.html.write_report", lambda folder: folder / "report.html")
        assert main(["merge", "adapter", "-o", "merged"]) == 0
        assert calls == [("adapter", Path("merged"), False)]
        assert main(["report", "runs/first"]) == 0
        assert capsys.readouterr().out == f"merged model: merged\nreport: {Path('runs/first/report.html')}\n"

    @pytest.mark.parametrize("command", ["merge", "generate", "chat"])
    def test_code_beside_a_model_is_run_where_it_is_asked_for(self, monkeypatch, tmp_path, command):
        """And not because a configuration beside the model says so, which may have come with it."""
        asked = []

        def noted(*given, trust_remote_code, **named):
            asked.append(trust_remote_code)
            return []

        for place in ("models.saving.merge_adapter", "inference.generate.generate_path", "inference.chat.open_chat"):
            monkeypatch.setattr(f"tether.{place}", noted)
        monkeypatch.setattr("tether.cli.talk.talk", lambda chat: None)
        (tmp_path / "config.yaml").write_text("model: {path: m, trust_remote_code: true}\nrewards: []\n")
        needed = {"merge": ["-o", "merged"], "generate": ["--prompts", "p.jsonl"], "chat": []}[command]
        for more in ([], ["--trust_remote_code"]):
            assert main([command, str(tmp_path), *needed, *more]) == 0
        assert asked == [False, True]

    def test_a_report_that_cannot_be_written_is_one_message(self, monkeypatch, tmp_path, capsys):
        (tmp_path / "metrics.jsonl").touch()
        monkeypatch.setattr("tether.report.html.tempfile.mkstemp", Mock(side_effect=PermissionError(13, "not allowed")))
        assert main(["report", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"tether: {tmp_path}: report.html cannot be written there: not allowed\n"

    def test_evaluate_shows_numbers_and_answers(self, monkeypatch, capsys):
        from tether.inference import evaluate

        calls = []

        def evaluate_path(run, prompts, *, split, subset, columns, output, metrics, display):
            calls.append((run, prompts, split, subset, columns, output, metrics))
            return evaluate.Evaluation({"eval_scores": 0.25}, [{"prompt": "sea", "response": "foam", "score": 1.5}])

        monkeypatch.setattr(evaluate, "evaluate_path", evaluate_path)
        given = ["evaluate", "runs/first", "--prompts", "p.jsonl", "-o", "out.jsonl"]
        how = ["--split", "test", "--subset=main", "--columns={prompt: ask}", "--metrics=m.json"]
        assert main(given) == main([*given, *how]) == 0
        assert calls == [
            (Path("runs/first"), "p.jsonl", None, None, None, Path("out.jsonl"), None),
            (Path("runs/first"), "p.jsonl", "test", "main", {"prompt": "ask"}, Path("out.jsonl"), Path("m.json")),
        ]
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("eval_scores", "0.25", "foam"))

    def test_generate_writes_lines_of_json_unless_a_file_is_named(self, monkeypatch, capsys):
        calls = []
        rows = [{"row": 0, "prompt": "sea", "response": "wäve", "finish_reason": "stop"}]
        monkeypatch.setattr(
            "tether.inference.generate.generate_path", lambda *given, **named: calls.append(named) or rows
        )
        assert main(["generate", "m", "--prompts", "p.jsonl", "--temperature", "0", "--response_length=8"]) == 0
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
        assert main(["generate", "m", "--prompts", "p.jsonl", "-o", "out.jsonl"]) == 0
        assert capsys.readouterr().out == ""
        assert [named["temperature"] for named in calls] == [0.0, None]
        assert [named["response_length"] for named in calls] == [8, None]
        assert main(["generate", "m", "--prompts", "p.jsonl", "--max_prompt_length", "9"]) == 0
        assert [named["max_prompt_length"] for named in calls] == [None, None, 9]

    def test_generate_writes_valid_json_in_any_encoding(self, monkeypatch):
        rows = [{"row": 0, "prompt": "sea", "response": "wäve \U0001f30a \x7f"}]
        monkeypatch.setattr("tether.inference.generate.generate_path", lambda *given, **named: rows)
        for encoding in ("ascii", "latin-1", "utf-8"):
            out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
            monkeypatch.setattr(sys, "stdout", out)
            assert main(["generate", "m", "--prompts", "p.jsonl"]) == 0
            out.flush()
            assert json.loads(out.buffer.getvalue().decode(encoding)) == rows[0]

    @pytest.mark.parametrize("option", ["--temperature=-1", "--temperature=nan", "--response_length=0", "--seed=x"])
    def test_a_number_out_of_range_is_2(self, option, capsys):
        assert main(["generate", "m", "--prompts", "p.jsonl", option]) == 2
        assert option.split("=")[0] in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("option", "told"),
        [
            ("--response_length=1.5", "got 1.5, wanted a whole number above 0"),
            ("--max_prompt_length=many", "got many, wanted a whole number above 0"),
            ("--temperature=hot", "got hot, wanted a number of at least 0"),
        ],
    )
    def test_what_is_no_number_is_told_as_one_out_of_range(self, option, told, capsys):
        assert main(["generate", "m", "--prompts", "p.jsonl", option]) == 2
        assert f"argument {option.split('=')[0]}: {told}" in capsys.readouterr().err

    def test_an_interrupted_demo_ends_with_130(self, monkeypatch):
        calls = []

        def run_demo(folder, *, seed, display):
            calls.append((folder, seed))
            return None if seed else object()

        monkeypatch.setattr("tether.demo.run.run_demo", run_demo)
        assert main(["demo", "--seed", "7", "-o", "x"]) == 130
        assert main(["demo", "--seed", "0"]) == 0
        assert calls == [(Path("x"), 7), (Path("runs/demo"), 0)]


class TestQuieten:
    @pytest.fixture(autouse=True)
    def keep(self, monkeypatch):
        monkeypatch.setattr(os, "environ", dict(os.environ))
        levels = {name: logging.getLogger(name).level for name in ("tether", "accelerate.accelerator")}
        logging.getLogger("accelerate.accelerator").setLevel(logging.NOTSET)  # commands of other tests have set it
        yield
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    def test_what_the_user_has_set_stays(self):
        os.environ["TRANSFORMERS_VERBOSITY"] = "info"
        os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
        quiet.quieten(debug=False)
        assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
        assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
        assert not logging.getLogger("accelerate.accelerator").isEnabledFor(logging.WARNING)

    def test_a_warning_cannot_act_on_the_terminal(self, capsys):
        record = logging.LogRecord("tether", logging.WARNING, "f", 1, "%s", ("a client sent \x1b[2J\u202e\nb",), None)
        quiet._Stderr().emit(record)
        assert capsys.readouterr().err == "a client sent \\x1b[2J\\u202e\nb\n"

    def test_a_warning_that_nobody_can_read_is_no_error(self, monkeypatch):
        monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError(5, "gone"))))
        quiet._Stderr().emit(logging.LogRecord("tether", logging.WARNING, "f", 1, "odd", (), None))
        assert sys.stderr.write.called

    def test_debugging_silences_nothing(self):
        os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
        quiet.quieten(debug=True)
        assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
        assert logging.getLogger("tether").level == logging.DEBUG
        assert logging.getLogger("accelerate.accelerator").isEnabledFor(logging.WARNING)
