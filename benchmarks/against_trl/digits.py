"""The reward of the long-tail workload, on both sides."""


def score(prompt: str, response: str, answer: str | None) -> float:
    """Return the share of digits in the response."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)
