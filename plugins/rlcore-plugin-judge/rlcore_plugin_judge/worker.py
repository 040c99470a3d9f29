"""The worker that asks the judge.

It limits the number of requests at one time, the seconds and retries of each, and the seconds of a whole call. A pair
that the judge does not decide is counted and gets the configured preference.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import httpx
import torch

from rlcore import ColumnSpec, DataProto
from rlcore.workers import Dispatch, Worker, register
from rlcore_plugin_judge.config import JudgeConfig

_log = logging.getLogger(__name__)

TEMPLATE = """\
Compare two responses to the same prompt. Judge whether they are right first, and then how well they are put. Which
stands first and which is longer must not matter.

<prompt>
{prompt}
</prompt>

<response_A>
{first}
</response_A>

<response_B>
{second}
</response_B>

Explain the difference in a few sentences. Then end with a line that holds one word: A if response A is better, B if
response B is better, tie if neither is.
"""
"""The default question, without `judge.template`."""

_VERDICT = re.compile(r"\W*(?:(?:final )?(?:verdict|answer|winner)\W+)?(?:response )?(A|B|tie)\W*", re.IGNORECASE)
_PREFERENCE = {"a": 1.0, "b": 0.0, "tie": 0.5}
_ON_ERROR = {"first": 1.0, "second": 0.0, "tie": 0.5}
_BACK_OFF = 0.5
"""Seconds before the first retry, doubled for each further one."""
_LONGEST_BACK_OFF = 30.0


class NoVerdict(Exception):
    """The judge gave no preference; the message has the reason."""


class JudgeWorker(Worker):
    """Asks the judge to compare pairs of responses."""

    def __init__(self, config: JudgeConfig, template: str, api_key: str | None) -> None:
        """`template` holds {prompt}, {first} and {second}; `api_key` is sent as a bearer token."""
        self._config, self._template = config, template
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("prompt_text", "first_text", "second_text"),
        gives={"preference": ColumnSpec.dense(torch.float32), "judge_error": ColumnSpec.dense(torch.bool)},
    )
    def compare(self, batch: DataProto) -> DataProto:
        """Return each row's preference.

        Reads the object columns prompt_text, first_text and second_text. Gives preference fp32 [rows]: 1 if the first
        is better, 0 if the second is, 0.5 for a tie; and judge_error bool [rows], True if the judge gave no preference
        and `judge.on_error` replaces it. Equal texts are a tie without a question.
        """
        texts = [list(batch.view(name)) for name in ("prompt_text", "first_text", "second_text")]
        rows = list(zip(*texts, strict=True))
        asked = [row for row, (_, first, second) in enumerate(rows) if first != second]
        questions = [self.question(*rows[row]) for row in asked]
        if self._config.both_orders:
            questions += [self.question(rows[row][0], rows[row][2], rows[row][1]) for row in asked]
        verdicts = self._answers(questions)
        preference = torch.full((len(rows),), 0.5)
        failures: dict[int, NoVerdict] = {}
        for number, row in enumerate(asked):
            by_order = verdicts[number :: len(asked)]
            failed = [verdict for verdict in by_order if isinstance(verdict, NoVerdict)]
            if failed:
                failures[row] = failed[0]
                preference[row] = _ON_ERROR[self._config.on_error]
            else:
                preference[row] = _agreed([verdict for verdict in by_order if not isinstance(verdict, NoVerdict)])
        self._account(failures, len(asked))
        error = torch.tensor([row in failures for row in range(len(rows))], dtype=torch.bool)
        return DataProto.from_single_dict({"preference": preference, "judge_error": error})

    def question(self, prompt: Any, first: str, second: str) -> str:
        """Return the template with the texts inserted; braces in the texts have no effect."""
        texts = {"prompt": str(prompt), "first": first, "second": second}
        return re.sub(r"\{(prompt|first|second)\}", lambda place: texts[place[1]], self._template)

    def _account(self, failures: dict[int, NoVerdict], asked: int) -> None:
        if not failures:
            return
        cause = next(iter(failures.values()))
        _log.warning("the judge gave no preference for %d of %d pairs; the first: %s", len(failures), asked, cause)

    def _answers(self, questions: Sequence[str]) -> list[float | NoVerdict]:
        """Return each question's preference for its first response, or the reason why there is none."""
        return asyncio.run(self._ask_all(questions)) if questions else []

    async def _ask_all(self, questions: Sequence[str]) -> list[float | NoVerdict]:
        config = self._config
        slots = asyncio.Semaphore(config.concurrency)
        async with httpx.AsyncClient(headers=self._headers, timeout=None) as client:
            tasks = [asyncio.create_task(self._ask(client, slots, question)) for question in questions]
            _, late = await asyncio.wait(tasks, timeout=config.total_timeout)
            for task in late:
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        verdicts: list[float | NoVerdict] = []
        for answer in answers:
            if isinstance(answer, asyncio.CancelledError):
                answer = NoVerdict(
                    f"gave no answer within judge.total_timeout = {config.total_timeout:g} s of the call"
                )
            elif isinstance(answer, BaseException) and not isinstance(answer, NoVerdict):
                raise answer
            verdicts.append(answer)
        return verdicts

    async def _ask(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, question: str) -> float:
        """Return the preference, or raise NoVerdict. A request that timed out is not sent again."""
        async with slots:
            for attempt in range(self._config.retries + 1):
                pause = min(_BACK_OFF * 2**attempt, _LONGEST_BACK_OFF)
                try:
                    async with asyncio.timeout(self._config.timeout):
                        response = await client.post(self._address, content=self._body(question))
                except TimeoutError:
                    raise NoVerdict(f"gave no answer within judge.timeout = {self._config.timeout:g} s") from None
                except httpx.RequestError as error:
                    cause = f"cannot be reached: {type(error).__name__}: {error}"
                else:
                    if response.is_success:
                        return verdict_of(response)
                    cause = f"answered with status {response.status_code}: {response.text[:200]!r}"
                    if response.status_code != 429 and response.status_code < 500:
                        raise NoVerdict(cause)
                    pause = max(pause, _retry_after(response))
                if attempt < self._config.retries:
                    await asyncio.sleep(pause)
            raise NoVerdict(cause)

    @property
    def _address(self) -> str:
        return f"{(self._config.url or '').rstrip('/')}/chat/completions"

    def _body(self, question: str) -> bytes:
        messages = [{"role": "user", "content": question}]
        # ASCII escapes can hold any text, even half a surrogate pair.
        return json.dumps({**self._config.request, "model": self._config.model, "messages": messages}).encode("ascii")


def verdict_of(response: httpx.Response) -> float:
    """Return the preference at the end of an answer: 1 for A, 0 for B, 0.5 for a tie. Raises NoVerdict without one.

    The last line that is not empty must be A, B or tie, in any case, with any punctuation around it; `Verdict:`,
    `Answer:` or `Winner:` may precede it.
    """
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise NoVerdict(f"answered without choices[0].message.content: {response.text[:200]!r}")
    lines = [line for line in content.splitlines() if line.strip()]
    found = _VERDICT.fullmatch(lines[-1]) if lines else None
    if found is None:
        raise NoVerdict(f"ended its answer with {lines[-1][:200] if lines else ''!r} instead of A, B or tie")
    return _PREFERENCE[found[1].lower()]


def _agreed(by_order: Sequence[float]) -> float:
    """Return the preference of one answer, or of two with swapped sides; a tie if the two disagree."""
    if len(by_order) == 1 or by_order[0] == 1 - by_order[1]:
        return by_order[0]
    return 0.5


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of the header Retry-After, 0 without one."""
    asked = response.headers.get("Retry-After", "")
    return float(asked) if asked.isdecimal() else 0.0
