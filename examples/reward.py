"""A reward for `ligerzoo train --method grpo`: functions that return something, in few characters."""


def reward(completions: list[str], **fields: object) -> list[float]:
    """Returns a number for each completion."""
    return [("return" in completion) - 0.01 * len(completion) for completion in completions]
