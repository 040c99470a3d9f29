"""Reward functions that misbehave, loaded by path in the tests."""

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass

from rlcore import RewardSpec


@dataclass
class Verdict:
    value: float

    def __float__(self):
        return self.value


def length(prompt, response, answer):
    return len(response)


def level(prompt, response, answer, level, uid="none"):
    return level + (0.5 if uid == "0:1" else 0.0)


def everything(prompt, response, answer, **columns):
    print("chatter on stdout", flush=True)
    os.write(1, b"and straight on the descriptor\n")
    return 1.0 if sorted(columns) == ["extra", "uid"] else 0.0


def index_of(prompt, response, answer):
    return float(response)


def misbehave(prompt, response, answer):
    if response.startswith("shout"):
        raise ValueError(response[6:])
    return ACTS[response]()


def fails_once(prompt, response, answer):
    act, _, file = response.partition(" ")
    if act == "fine" or os.path.exists(file):
        return 1.0
    if file != "always":
        open(file, "x").close()
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"time": TimeoutError, "raise": ValueError}[act]("once")


def _batched_fails_once(prompts, responses, answers):
    return list(map(fails_once, prompts, responses, answers))


batched_fails_once = RewardSpec("ignored", _batched_fails_once, batched=True)


def hang():
    while True:
        pass


def hang_in_c():
    ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the GIL: no thread or signal handler of Python's could end it


def raise_error():
    raise ValueError(f"cannot judge {json.dumps('this')}")


def fork_and_hang():
    if os.fork() == 0:
        signal.pause()
    time.sleep(60)


def hoard():
    blocks = []
    while True:
        blocks.append(bytearray(64 * 2**20))


def babble():
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"\0\0\0\0\0\0\0\5hello")
        except OSError:
            continue


def leave_pipe_to_grandchild():
    if os.fork() == 0:
        time.sleep(60)
    os._exit(3)


ACTS = {
    "fine": lambda: 0.25,
    "bool": lambda: True,
    "object": lambda: Verdict(2.0),
    "raise": raise_error,
    "exit": lambda: sys.exit(5),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "hang": hang,
    "hang in C": hang_in_c,
    "fork and hang": fork_and_hang,
    "hoard": hoard,
    "_exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "real-time signal": lambda: os.kill(os.getpid(), 40),
    "segfault": lambda: ctypes.string_at(0),
    "orphan": leave_pipe_to_grandchild,
    "babble": babble,
    "recurse": lambda: ACTS["recurse"](),
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "huge": lambda: 1e39,
    "int": lambda: 10**400,
    "string": lambda: "1.0",
    "none": lambda: None,
    "list": lambda: [1.0],
}


def _batched(prompts, responses, answers, **columns):
    act = responses[0]
    if act == "short":
        return [1.0]
    if act == "scalar":
        return 1.0
    if act == "text":
        return "1" * len(responses)
    if act == "one bad":
        return [1.0] * (len(responses) - 1) + ["b"]
    if act == "slow":
        time.sleep(0.2 * len(responses))
    if act == "hang":
        time.sleep(60)
    return [float(len(response)) for response in responses]


batched = RewardSpec("ignored", _batched, batched=True)


async def later(prompt, response, answer):
    return 1.0


def too_few(prompt, response):
    return 1.0


NOT_A_FUNCTION = 3
