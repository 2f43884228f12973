"""Sentiment by VADER: the demo's gold judge, which neither the pairs nor the reward model ever saw.

Source: Hutto & Gilbert 2014, https://ojs.aaai.org/index.php/ICWSM/article/view/14550
"""

from collections.abc import Sequence
from importlib.util import find_spec

from tether.errors import ConfigError


def check_installed() -> None:
    """Raises ``ConfigError`` without the package vaderSentiment."""
    if find_spec("vaderSentiment") is None:
        raise ConfigError('the demo judges with VADER, which is not installed: pip install "tether[demo]"')


def compound(texts: Sequence[str]) -> list[float]:
    """VADER's compound score of each text: −1 is most negative, 0 neutral, 1 most positive."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in texts]
