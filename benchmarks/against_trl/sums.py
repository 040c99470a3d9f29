"""The reward of the quickstart workload, on both sides."""


def score(prompt: str, response: str, answer: str | None) -> float:
    """Return 1 for the right result, else 0."""
    return float(response.strip() == answer)
