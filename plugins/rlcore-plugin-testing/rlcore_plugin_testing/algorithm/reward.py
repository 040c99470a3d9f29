"""The suite's reward. It depends only on the response's text, and differs between most responses to a prompt."""


def score(prompt: str, response: str, answer: object, **columns: object) -> float:
    """Return 0, 0.25, 0.5, 0.75 or 1, by the sum of the response's characters."""
    return sum(map(ord, response)) % 5 / 4
