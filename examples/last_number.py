"""A reward that can be checked: 1 where the last number of an answer is the right one."""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(prompts, completions, answer, **columns):
    """1.0 where the last number in the text equals the column ``answer``, a number or its text, otherwise 0.0.

    ``completions`` are texts, or lists of chat messages where the dataset has messages.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    pairs = zip(map(last, texts), map(last, map(str, answer)), strict=True)
    return [float(found is not None and found == right) for found, right in pairs]


def last(text):
    """The last number in a text, None without one; commas between thousands do not count."""
    numbers = NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None
