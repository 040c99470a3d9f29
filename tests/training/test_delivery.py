"""Proof of delivery in whole runs: frozen roles stay as they are, and a resumed run has its weights, or stops."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.assets import TINY
from rlcore.engines.hf.rollout import HFRollout
from rlcore.errors import WeightsError
from rlcore.plugins import PluginManager

OPTIONS = ["algo=grpo", "algo.group_size=6", "trainer.total_steps=3", "trainer.checkpoint_every=1"]
OPTIONS += ["cluster.pools={main: [actor, ref], gen: [rollout]}"]
CHANGED = "model.layers.1.self_attn.v_proj.weight"


def change(file) -> None:
    """Change one element of one parameter in its last bit."""
    tensors = load_file(file)
    tensors[CHANGED].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})


class StopAfterStep2(PluginManager):
    """Breaks the run at the end of step 2, with the checkpoint of step 1."""

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 2:
            raise RuntimeError("stop here")


@pytest.fixture
def ref_folder(tmp_path):
    """A model folder of the reference's own."""
    return shutil.copytree(TINY, tmp_path / "reference")


@pytest.fixture
def stopped(train_small, ref_folder, tmp_path):
    """A function that resumes a run that stopped in step 2, and the run's folder; its reference has its own folder."""
    folder = tmp_path / "run"
    options = [*OPTIONS, f"roles.ref.model={ref_folder}"]
    with pytest.raises(RuntimeError, match="stop here"):
        train_small(folder, *options, plugins=StopAfterStep2.load())
    return lambda: train_small(folder, *options), folder


def test_a_resume_with_the_same_weights_goes_on(stopped):
    resume, folder = stopped
    saved = json.loads((folder / "checkpoints" / "step_00000001" / "trainer.json").read_text())["fingerprints"]
    assert saved.keys() == {"actor", "ref"}
    assert saved["actor"].keys() == saved["ref"].keys()
    assert saved["actor"] != saved["ref"]
    assert resume()["status"] == "finished"


def test_a_reference_whose_folder_changed_between_start_and_resume_is_named(stopped, ref_folder):
    change(ref_folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"role 'ref' changed .*: 1 of 38 parameters differ: {CHANGED}\."):
        stopped[0]()


def test_trained_weights_that_a_checkpoint_lost_are_named(stopped, forget):
    resume, folder = stopped
    checkpoint, name = folder / "checkpoints" / "step_00000001", "actor/model/model.safetensors"
    change(checkpoint / name)
    forget(checkpoint, name)
    with pytest.raises(WeightsError, match=rf"role 'actor' changed .*: 1 of 38 parameters differ: {CHANGED}\."):
        resume()


def test_the_first_switch_after_a_resume_is_checked(stopped, monkeypatch):
    """The reference stays; the sampler of the resumed run loses a parameter."""
    sync = HFRollout.sync

    def dropping(engine, weights, version, shapes):
        kept = dict(engine.hf.named_parameters())[CHANGED].detach().clone()
        sync(engine, ((name, kept if name == CHANGED else tensor) for name, tensor in weights), version, shapes)

    monkeypatch.setattr(HFRollout, "sync", dropping)
    with pytest.raises(WeightsError, match=rf"version 1 by the route Received: 1 of 38 .*: {CHANGED}\."):
        stopped[0]()


def test_a_frozen_role_that_changes_in_a_run_stops_it_before_the_next_checkpoint(train_small, tmp_path):
    class Shaking(PluginManager):
        def step_end(self, run, step, metrics):
            super().step_end(run, step, metrics)
            if step == 2:
                (worker,) = run.ref.group._processes._workers["ref"]
                dict(worker.train.model.hf.named_parameters())[CHANGED].data[0, 0] += 1

    with pytest.raises(WeightsError, match=rf"role 'ref' changed without training: 1 of 38 .*: {CHANGED}\."):
        train_small(tmp_path / "run", *OPTIONS, plugins=Shaking.load())
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == ["step_00000001"]
