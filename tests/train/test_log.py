"""What a run shows while it goes on."""

from pathlib import Path

from tether.metrics.trackers import Trackers
from tether.train.display import NullDisplay
from tether.train.log import NEGATIVE_KL, RunLog


class Told(NullDisplay):
    """Keeps messages."""

    def __init__(self):
        self.texts = []

    def message(self, text):
        self.texts.append(text)


def test_the_first_kl_below_0_is_explained_and_no_other():
    display = Told()
    log = RunLog(None, display, Trackers("none", "run", Path("."), {}), logging_steps=1)
    for step, kl in enumerate([0.0, 0.2], start=1):
        log.update(step, 4, {"objective/kl": kl})
    assert display.texts == []
    for step, kl in enumerate([-0.1, -0.2], start=3):
        log.update(step, 4, {"objective/kl": kl})
    log.evaluation(4, {"eval_kl": -0.1}, [])
    assert display.texts == [NEGATIVE_KL, "evaluation after 4 updates: KL −0.1"]


def test_the_line_of_an_evaluation_says_what_its_numbers_are():
    display = Told()
    log = RunLog(None, display, Trackers("none", "run", Path("."), {}), logging_steps=1)
    log.evaluation(1, {"eval_scores": -2.65, "eval_length": 53.0, "eval_eos_rate": 0.5}, [])
    said = "evaluation after 1 update: reward −2.65, tokens per answer 53, 50 % of the answers ended by themselves"
    assert display.texts == [said]
