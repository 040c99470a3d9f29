"""Curricula in runs: what steps measure reaches the next epoch, through a resume too. Together 8 CPU seconds."""

import json

import pytest
import torch

from rlcore.config import compose
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager
from rlcore.protocol import DataProto
from rlcore.training.health import prompt_results
from rlcore.training.preflight import preflight

SETTINGS = ["data.batch_size=4", "tracker=jsonl"]  # two steps are an epoch
MEASURED = [*SETTINGS, "data.curriculum.by=measured", "data.curriculum.skip=0.5"]


def batch(uid, scores, *, missing=(), **columns):
    values = {"uid": uid, "scores": torch.tensor(scores), **columns}
    values["reward_error"] = torch.tensor([row in missing for row in range(len(uid))])
    return DataProto.from_single_dict(values)


def test_what_the_samples_of_a_prompt_have_shown():
    first = batch(["0:1", "0:1", "0:2", "0:2", "0:3"], [1.0, 1.0, 0.0, 0.5, 1.0])
    again = batch(["0:3"], [1.0])
    assert prompt_results([first, again]) == {"0:1": (1.0, True), "0:2": (0.25, False), "0:3": (1.0, True)}
    assert prompt_results([batch(["0:4"], [1.0])]) == {"0:4": (1.0, False)}
    assert prompt_results([]) == {}
    failed = batch(["0:5", "0:5", "0:6"], [1.0, float("nan"), float("nan")], missing=(1, 2))
    assert prompt_results([failed]) == {"0:5": (1.0, False)}


def test_branches_of_an_episode_are_one_sample():
    branches = batch(["0:1"] * 4, [1.0, 1.0, 1.0, 0.0], episode=["a", "a", "a", "b"])
    assert prompt_results([branches]) == {"0:1": (0.5, False)}
    assert prompt_results([batch(["0:1"] * 2, [1.0, 1.0], episode=["a", "a"])]) == {"0:1": (1.0, False)}


def test_a_resumed_run_has_the_same_batches(train_small, tmp_path):
    """Stopped in its second epoch, whose order the results of the first have made."""
    settings = [*MEASURED, "trainer.total_steps=5", "trainer.checkpoint_every=3"]
    train_small(tmp_path / "straight", *settings)
    whole = drawn(tmp_path / "straight")
    state = json.loads((tmp_path / "straight" / "checkpoints" / "step_00000003" / "trainer.json").read_text())
    assert len(state["loaders"]["train"]["curriculum"]["results"]) == 8
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train_small(stopped, *settings, plugins=StopsAtFour.load())
    train_small(stopped, *settings)
    assert drawn(stopped) == whole
    plain = tmp_path / "plain"
    train_small(plain, *SETTINGS, "trainer.total_steps=4")
    assert list(drawn(plain).values())[:2] == list(whole.values())[:2]  # the first epoch
    assert list(drawn(plain).values())[2:4] != list(whole.values())[2:4]


class StopsAtFour(PluginManager):
    """Interrupts a run at the end of its fourth step, which is then not saved."""

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 4:
            raise KeyboardInterrupt


def drawn(folder):
    """The uids of each step's prompts, in the order in which they came."""
    found = {}
    for file in sorted((folder / "samples").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            found.setdefault(file.stem, []).append(json.loads(line)["uid"])
    return {step: list(dict.fromkeys(uids)) for step, uids in found.items()}


def check(*overrides):
    plugins = PluginManager.load()
    preflight(compose(["cluster=in_process", *overrides], plugins), plugins)


def test_what_cannot_measure_is_refused():
    with pytest.raises(ConfigError, match=r"algo=sft scores no samples, so data\.curriculum\.by=measured"):
        check("algo=sft", "data.curriculum.by=measured")
    ahead = ["algo=grpo", "trainer.rollouts_ahead=1", "cluster=local", "cluster.workers=2"]
    with pytest.raises(ConfigError, match=r"trainer\.rollouts_ahead=1 a step begins before the last one has any"):
        check(*ahead, "data.curriculum.skip=0.5")
    with pytest.raises(ConfigError, match=r"trainer\.epochs = 2 has no number of steps with data\.curriculum\.skip"):
        check("algo=grpo", "trainer.epochs=2", "data.curriculum.skip=0.5")
    check("algo=sft", "data.curriculum.by=label")
