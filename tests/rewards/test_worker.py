from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.config.schema import ClusterConfig, RewardConfig
from rlcore.errors import DataError, RLCoreError
from rlcore.plugins.specs import RewardSpec
from rlcore.protocol import DataProto
from rlcore.rewards.arithmetic import arithmetic
from rlcore.rewards.compose import resolve
from rlcore.rewards.worker import RewardWorker, named_scores
from rlcore.workers import ClassWithInitArgs, make_executor

FILE = Path(__file__).parent / "functions.py"
INSTALLED = {"arithmetic": RewardSpec("arithmetic", arithmetic)}


def batch(responses):
    rows = len(responses)
    return DataProto.from_single_dict(
        {
            "prompt_text": ["p"] * rows,
            "response_text": responses,
            "answer": ["4"] * rows,
            "uid": [f"0:{row // 2}" for row in range(rows)],
            "sample_index": torch.arange(rows) % 2,
            "level": list(range(rows)),
        }
    )


@pytest.fixture(params=["in_process"])
def start(request):
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with make_executor(ClusterConfig(executor=request.param)) as executor:

        def build(config, workers):
            pool = executor.resource_pool(workers, cpus_per_worker=1, gpus_per_worker=0.0)
            rewards = resolve(config, "arithmetic", INSTALLED)
            group = executor.worker_group(pool, ClassWithInitArgs(RewardWorker, rewards, config), name="reward")
            group.start().get()
            return group

        yield build


@pytest.mark.parametrize(
    ("start", "workers"),
    [("in_process", 1), ("in_process", 2), pytest.param("ray", 2, marks=pytest.mark.ray)],
    indirect=["start"],
)
def test_scores_errors_and_details_whatever_the_number_of_workers(start, workers):
    config = RewardConfig(
        functions={"arithmetic": 2.0, f"{FILE}:misbehave": 1.0, f"{FILE}:level": 0.0}, timeout=0.5, error_value=-1.0
    )
    responses = ["fine", "raise", "hang", "bool", "nan"]
    expected = [0.25, -1.0, -1.0, 1.0, -1.0]
    scored = start(config, workers).score(batch(responses), ["arithmetic", "functions.misbehave", "functions.level"])
    assert scored["scores"].dtype == torch.float32
    assert scored["scores"].tolist() == expected
    assert scored["reward_error"].tolist() == [False, True, True, False, True]
    assert scored["score/arithmetic"].tolist() == [0.0] * 5
    assert scored["score/functions.misbehave"].tolist() == expected
    assert scored["score/functions.level"].tolist() == [0.0, 1.0, 2.5, 3.5, 4.0]
    details = scored["reward_detail"]
    assert details[0] is None
    assert {name: details[2][name] for name in ("uid", "sample_index", "function", "cause")} == {
        "uid": "0:1",
        "sample_index": 0,
        "function": "functions.misbehave",
        "cause": "gave no answer within 0.5 s",
    }


def test_one_function_alone_is_not_shown_by_name_and_one_beside_a_reward_model_or_another_is():
    level = resolve(RewardConfig(functions={f"{FILE}:level": 0.0}), "arithmetic", INSTALLED)
    assert named_scores(level, RewardConfig()) == ()
    assert named_scores(level, RewardConfig(model="some/folder")) == ("functions.level",)
    assert named_scores([*level, *level], RewardConfig()) == ("functions.level", "functions.level")


def test_fewer_rows_than_workers_and_none(start):
    group = start(RewardConfig(), 3)
    scored = group.score(batch(["4"]))
    assert scored["scores"].tolist() == [1.0]
    assert "score/arithmetic" not in scored
    nothing = group.score(batch([]))
    assert len(nothing) == 0
    assert nothing["scores"].dtype == torch.float32
    assert nothing["reward_detail"].dtype == np.dtype(object)


def test_a_batch_without_the_columns_that_rewards_read(start):
    group = start(RewardConfig(), 1)
    with pytest.raises(
        DataError,
        match=r"reads the column 'answer', which its batch lacks; the batch has \['prompt_text', 'response_text'\]",
    ):
        group.score(batch(["4"]).select([], ["prompt_text", "response_text"], [])).materialize()


def test_a_function_that_does_not_load_is_an_error_at_start(start, tmp_path):
    file = tmp_path / "picky.py"
    file.write_text(
        "class Judge:\n    def __getstate__(self):\n        return {'a': 1}\n"
        "    def __setstate__(self, state):\n        raise OSError('no judge on this host')\n"
        "JUDGE = Judge()\ndef score(prompt, response, answer):\n    return JUDGE(response)\n"
    )
    with pytest.raises(RLCoreError, match=r"(?s)'picky.score' cannot be loaded.*OSError: no judge on this host"):
        start(RewardConfig(path=f"{file}:score"), 1)
