"""Every error that Tether raises on purpose.

    TetherError
    ├── ConfigError              a key, a value or a combination of them is wrong
    ├── DataError                a file or a row of it is wrong
    ├── ModelError               a model folder is not what the configuration says
    ├── RewardError              a reward source could not score an answer
    │   ├── RewardTimeout        it did not respond in time
    │   └── RewardResponseError  its response is not one finite score per answer
    ├── GenerationError          the policy could not produce an answer
    ├── TrainingError            training cannot go on: a value is not finite, or something does not fit into memory
    ├── OutOfStep                one of several processes could not continue, so none can
    ├── LostProcess              another process of the run is gone
    ├── HubError                 a model could not be pushed to the hub
    └── CheckpointError          a saved state is incomplete, damaged or of another run

The command line turns ``ConfigError``, ``DataError``, ``ModelError`` and ``CheckpointError`` into one readable message
and exit code 2, every other error into exit code 1.
"""


class TetherError(Exception):
    """Base class of the errors that Tether raises on purpose."""


class ConfigError(TetherError):
    """A key, a value or a combination of values of the configuration is wrong."""


class DataError(TetherError):
    """A dataset, a file or a row of it is wrong."""


class ModelError(TetherError):
    """A model, adapter or tokenizer folder is not what the configuration says it is."""


class RewardError(TetherError):
    """A reward source could not score an answer."""


class RewardTimeout(RewardError):
    """A reward source did not respond in time."""


class RewardResponseError(RewardError):
    """A reward source's response is not one finite score for each answer."""


class GenerationError(TetherError):
    """The policy could not produce an answer."""


class TrainingError(TetherError):
    """Training cannot go on: a loss, a gradient or a weight is not finite, something does not fit into memory, or there
    is nothing to learn from. No optimizer step is taken with it."""


class OutOfStep(TetherError):
    """A process could not continue what all processes do together, so none of them can."""


class LostProcess(TetherError):
    """Another process of the run ended, or did not respond in time."""


class HubError(TetherError):
    """A model could not be pushed to the hub; it is complete in its folder."""


class CheckpointError(TetherError):
    """A saved state is incomplete, damaged, or belongs to another run."""


USER_ERRORS = (ConfigError, DataError, ModelError, CheckpointError)
"""Errors that a user can fix: exit code 2 on the command line."""
