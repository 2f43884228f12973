"""A reward function in an importable module."""


def length(prompts, completions):
    return [float(len(completion)) for completion in completions]
