"""A reward that can be checked: 1 where the last number of an answer is the right one."""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(prompts, completions, answer, **columns):
    """1.0 where the last number in the text equals the column ``answer``, otherwise 0.0."""
    found = [NUMBER.findall(text.replace(",", "")) for text in completions]
    return [
        float(bool(numbers) and float(numbers[-1]) == float(right))
        for numbers, right in zip(found, answer, strict=True)
    ]
