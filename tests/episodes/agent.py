"""An agent as users write them: the openai client, and an address from its environment. Its first word says how."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request

import openai

task = json.loads(os.environ["RLCORE_TASK"])
assert json.load(sys.stdin) == task
how = sys.argv[1]
options = {"model": "gpt", "messages": task["messages"]}


def post_reward(value: float) -> None:
    request = urllib.request.Request(
        os.environ["RLCORE_REWARD_URL"],
        json.dumps({"reward": value}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()


async def several() -> None:
    """Two conversations at the same time, each of two turns."""
    async with openai.AsyncOpenAI() as client:

        async def talk(number: int) -> None:
            messages = [{"role": "user", "content": f"{number}+{number}="}]
            for _ in range(2):
                answer = (await client.chat.completions.create(model="x", messages=messages)).choices[0].message
                messages.extend([answer.model_dump(exclude_none=True), {"role": "user", "content": "again"}])

        await asyncio.gather(*(talk(number) for number in (1, 2, 1)))


if how == "silent":
    sys.exit(0)
if how == "quiet":
    time.sleep(60)
if how == "several":
    asyncio.run(several())
    sys.exit(0)

with openai.OpenAI(max_retries=0) as client:
    if how == "endless":
        messages = list(task["messages"])
        try:
            while True:
                message = client.chat.completions.create(model="gpt", messages=messages).choices[0].message
                messages += [message, {"role": "user", "content": "go on"}]
        except openai.BadRequestError as error:
            sys.exit(error.code not in ("max_turns_exceeded", "context_length_exceeded"))
    message = client.chat.completions.create(**options).choices[0].message
    if how == "flaky" and not os.path.exists(os.environ["FLAKY"] + task["uid"]):
        open(os.environ["FLAKY"] + task["uid"], "w").close()
        sys.exit("not the first time")
    if how == "broken":
        raise RuntimeError("this agent is broken")
    if how == "turns":
        messages = [*task["messages"], message, {"role": "user", "content": "once more"}]
        client.chat.completions.create(model="gpt", messages=messages)
    if how == "leaves":
        child = subprocess.Popen(["sleep", "60"])
        with open(os.environ["FLAKY"] + "child", "w") as file:
            file.write(str(child.pid))
    post_reward(float(len(message.content or "")))
