"""The judge's config: the keys `judge.*`, and their checks."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rlcore import Config, ConfigError, option


@dataclass(frozen=True)
class JudgeConfig:
    """A language model that compares two responses, behind an OpenAI-compatible HTTP endpoint."""

    url: str | None = option(None, "base URL of the endpoint, as http://host:8000/v1; /chat/completions is added")
    model: str | None = option(None, "the judge's name there")
    template: str | None = option(
        None, "file with the question: text with {prompt}, {first} and {second} (default: the plugin's own)"
    )
    api_key_env: str | None = option(
        None, "name of the environment variable that holds the API key, read where the command runs; none: no key"
    )
    request: dict[str, Any] = option({"temperature": 0.0}, "further fields of each request, as max_tokens")
    both_orders: bool = option(
        True, "ask twice, with sides swapped; two answers that disagree are a tie (against a bias for one place)"
    )
    concurrency: int = option(8, "largest number of requests under way at one time", min=1)
    timeout: float = option(60.0, "seconds that one request may take", min=0.01)
    retries: int = option(3, "times a request is sent again after a connection error or status 429 or 5xx", min=0)
    total_timeout: float = option(600.0, "seconds that all questions of one call may take together", min=0.01)
    on_error: Literal["tie", "first", "second"] = option("tie", "preference for a pair that the judge did not decide")
    max_failures: float = option(
        0.25,
        "share of a call's pairs; if the judge fails on more, the run stops with a checkpoint",
        min=0.0,
        max=1.0,
        incidental=True,
    )


def check(config: Config) -> None:
    """Raise ConfigError for settings with which no question could be asked."""
    judge = config.section(JudgeConfig)
    if judge.url is None:
        if judge.model is not None:
            raise ConfigError(f"judge.model = {judge.model!r} is not used: set judge.url, or leave out judge.model")
        return
    _check_url(judge.url)
    if not judge.model:
        raise ConfigError(f"judge.url = {judge.url!r} needs judge.model, the judge's name there")
    if taken := {"model", "messages", "stream"} & set(judge.request):
        raise ConfigError(f"judge.request sets {', '.join(sorted(taken))}, which rlcore sets itself; leave it out")
    if judge.api_key_env is not None:
        _check_key(judge.api_key_env)
    if judge.template is not None:
        _check_template(Path(judge.template))


def _check_url(url: str) -> None:
    if "@" in url or "?" in url:
        raise ConfigError(
            "judge.url holds a name, password or query, and the config is written to files; put the key into an "
            "environment variable and its name into judge.api_key_env"
        )
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError(f"judge.url = {url!r} must be an HTTP address, as http://localhost:8000/v1")


def _check_key(variable: str) -> None:
    # A value that is not a name may be the key itself, which no message should show.
    if not variable.isidentifier():
        raise ConfigError("judge.api_key_env must be the name of an environment variable, as JUDGE_KEY, not the key")
    key = os.environ.get(variable, "")
    if not re.fullmatch(r"[!-~]+", key):
        how = "holds characters that a key cannot have (spaces, line ends)" if key else "is not set"
        raise ConfigError(f"judge.api_key_env = {variable!r}: that environment variable {how}; export it")


def _check_template(file: Path) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge.template = '{file}' cannot be read: {error}") from error
    if missing := [name for name in ("{prompt}", "{first}", "{second}") if name not in text]:
        raise ConfigError(f"judge.template = '{file}' lacks {', '.join(missing)}, which stand for the texts")
