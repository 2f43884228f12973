"""A run whose figures count: one that ran to its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from transformers import TrainerCallback

from tether.config.schema import RunConfig
from tether.train.display import Display
from tether.train.run import RunResult, train_policy


def whole_run(
    config: RunConfig, *, display: Display | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> RunResult:
    """Trains; ends the program if the run is interrupted, as partial figures would pass for those of a whole run."""
    result = train_policy(config, display=display, callbacks=callbacks)
    end_if_interrupted(result.interrupted)
    return result


def end_if_interrupted(reason: str | None) -> None:
    """Ends the program with the exit code of an interrupted run.

    Args:
        reason: what interrupted the run, None if nothing did.
    """
    if reason is not None:
        print(f"stopped by {reason}: nothing was measured", file=sys.stderr)
        raise SystemExit(130)
