"""Variables of launchers: read where there is one, told by name where they are left from something else."""

import pytest

from tether.cli.main import main
from tether.config import launched
from tether.errors import ConfigError
from tether.machine.distributed import Dist

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_LAUNCHER = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a launcher, and no others."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_to(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_a_launcher_says_how_many_processes_there_are_and_which_one_this_is(environment):
    environment(OF_LAUNCHER)
    launched.check()
    assert (launched.num_processes(), launched.rank(), launched.local_rank()) == (2, 1, 1)


@pytest.mark.parametrize("variables", [{}, {"RANK": "0"}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "-1"}])
def test_a_process_alone_is_the_first(environment, variables):
    environment(variables)
    launched.check()
    assert (launched.num_processes(), launched.rank()) == (1, 0)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "two"}, "variable WORLD_SIZE: got 'two', wanted a whole number"),
        ({"WORLD_SIZE": "0"}, "variable WORLD_SIZE: got '0', wanted a whole number of at least 1"),
        ({"RANK": "1.0"}, "variable RANK: got '1.0', wanted a whole number"),
        ({"LOCAL_RANK": "-2"}, "variable LOCAL_RANK: got '-2', wanted a whole number of at least -1"),
        ({**OF_LAUNCHER, "RANK": "2"}, "variable RANK: got '2', wanted a number below WORLD_SIZE, 2"),
        ({"RANK": "1"}, "variable RANK: got '1', wanted a number below WORLD_SIZE, 1"),
    ],
)
@pytest.mark.parametrize("command", ["ppo", "plan", "score"])
def test_a_variable_that_is_no_such_number_is_told_by_every_command(environment, capsys, variables, told, command):
    environment(variables)
    assert main([command, "run.yaml"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR are not set. To run one process, unset W"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is 0, but WORLD_SIZE, RANK, MASTER_ADDR are not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "is 2 and LOCAL_RANK is 0, but MASTER_ADDR is not set"),
    ],
)
def test_a_run_that_nothing_launched_names_what_lacks(environment, variables, told):
    environment(variables)
    with pytest.raises(ConfigError, match=told):
        Dist()
