"""The loop that decodes requests which come and go."""

import time

import pytest

from rlcore.engine.rollout import Request, Sampling
from rlcore.episodes import source


class OneByOne:
    """Gives a request at each poll; `pause` seconds pass before each."""

    def __init__(self, requests, pause=0.0):
        self.left, self.pause, self.taken = list(requests), pause, []
        self.count = len(self.left)

    @property
    def done(self):
        return len(self.taken) == self.count

    def poll(self, wait):
        if not self.left:
            return []
        time.sleep(self.pause)
        return [self.left.pop()]

    def take(self, row):
        self.taken.append(row.id)


@pytest.fixture
def first_rows(tiny_engine, monkeypatch):
    """Answer a source's requests; return the number of rows in the first step."""

    def answer(requests):
        sizes, step = [], tiny_engine.step
        monkeypatch.setattr(tiny_engine, "step", lambda: sizes.append(len(tiny_engine.in_flight)) or step())
        source.answer_requests(tiny_engine, requests)
        return sizes[0]

    return answer


def request(number):
    return Request(str(number), (5, 6, 7), number, Sampling(max_tokens=2))


def test_requests_that_follow_one_another_begin_together(first_rows):
    requests = OneByOne(map(request, range(5)))
    assert first_rows(requests) == 5
    assert sorted(requests.taken) == list("01234")


def test_requests_that_go_on_and_on_do_not_wait_for_one_another(first_rows):
    pause = source.LONGEST_GATHERING / 2
    assert first_rows(OneByOne(map(request, range(20)), pause)) <= 4
