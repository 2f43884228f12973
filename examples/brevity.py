"""A reward function: answers of about ten words are best."""


def brevity(prompts, completions, **columns):
    """0 at ten words, a tenth less for each word more or fewer.

    ``prompts`` and ``completions`` are lists of texts, or of chat messages where the dataset has messages; ``columns``
    are the dataset's other columns.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [-abs(len(text.split()) - 10) / 10 for text in texts]
