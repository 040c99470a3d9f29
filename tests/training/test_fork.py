"""A run from a checkpoint of another one: with nothing changed it is the other's continuation. About 20 s."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.cli import main
from rlcore.config import compose, from_yaml
from rlcore.errors import CheckpointError, ConfigError
from rlcore.plugins import PluginManager
from rlcore.training.checkpoint import checkpoints
from rlcore.training.fork import Source, source_step, target_of, with_source

STEPS = ["trainer.total_steps=4", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=0", "rollout.response_len=3"]


GRADES = """
def grade(prompt, response, answer):
    return sum(map(ord, response)) % 7 / 7
"""


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Options of four steps whose rewards differ, so that every step moves the weights."""
    file = tmp_path_factory.mktemp("reward") / "grades.py"
    file.write_text(GRADES)
    return [*STEPS, "~reward.functions", f"reward.path={file}:grade"]


@pytest.fixture(scope="module")
def source(train_small, graded, tmp_path_factory):
    """The folder of a GRPO run with checkpoints of the steps 2 and 4, which has evaluated at the steps 0, 3 and 4."""
    folder = tmp_path_factory.mktemp("source") / "run"
    best = ["trainer.best=eval/score", "trainer.lower_is_better=[eval/score]"]
    train_small(folder, *graded, "trainer.eval_every=3", "data.eval_size=2", *best)
    return folder


@pytest.fixture
def fork(tmp_path):
    """Return a function that forks a run into tmp_path/fork and returns that folder; fails unless it trained."""

    def run(word, *overrides: str, to: str = "fork") -> Path:
        folder = tmp_path / to
        assert main(["train", "--from", str(word), f"run.dir={folder}", *overrides]) == 0
        return folder

    return run


def fails(capsys, *argv: str) -> str:
    """Return the message with which `rlcore train` ends."""
    capsys.readouterr()
    assert main(["train", *argv]) != 0
    return capsys.readouterr().err


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all weights and moments of the newest checkpoint."""
    newest = checkpoints(folder / "checkpoints")[-1]
    found = {
        f"{file.relative_to(newest)}/{name}": tensor
        for file in newest.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert any("exp_avg" in name for name in found)
    return found


def state(folder: Path) -> dict:
    return json.loads((checkpoints(folder / "checkpoints")[-1] / "trainer.json").read_text())


def assert_same_end(first: Path, second: Path) -> None:
    left, right = tensors(first), tensors(second)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    for key in ("step", "random", "loaders", "algorithm", "fingerprints"):
        assert state(first)[key] == state(second)[key]


def log_of(folder: Path) -> str:
    return (folder / "rlcore.log").read_text()


def test_nothing_changed_is_the_same_run(source, fork, metrics_of, samples_of, capsys):
    forked = fork(f"{source}@2", "tracker.use=[console]")
    assert f"· from {source} at step 2\n" in capsys.readouterr().out
    assert metrics_of(forked) == metrics_of(source)[3:]  # of the steps 3 and 4
    assert samples_of(forked) == {step: samples_of(source)[step] for step in (3, 4)}
    assert_same_end(forked, source)
    assert f"from {source} at step 2; other keys: none" in log_of(forked)
    assert f"source: {source}/checkpoints/step_00000002" in (forked / "config.yaml").read_text()
    # Its best is that of its own evaluations; the source's, of step 0, has no checkpoint here.
    summary = json.loads((forked / "summary.json").read_text())
    assert (summary["steps"], summary["best"]["step"]) == (4, 3)
    assert (forked / "checkpoints" / "best").resolve().name == "step_00000003"


def test_ppo_and_the_state_of_its_controller(train_small, graded, fork, metrics_of, tmp_path):
    """A changed kl_coef counts, though the checkpoint has the controller's own."""
    options = ["algo=ppo", "algo.kl_controller=adaptive", "algo.kl_in=reward", "algo.kl_coef=0.1"]
    train_small(tmp_path / "ppo", *options, *graded, "trainer.total_steps=3")
    same = fork(f"{tmp_path}/ppo@2", to="same")
    assert metrics_of(same) == metrics_of(tmp_path / "ppo")[2:]
    assert_same_end(same, tmp_path / "ppo")
    other = fork(f"{tmp_path}/ppo@2", "algo.kl_coef=7.0", to="other")
    assert state(other)["algorithm"]["state"]["kl_coef"] > 6
    assert "the algorithm's state begins anew" in log_of(other)
    assert "other keys: algo.kl_coef" in log_of(other)


def test_another_setting_has_the_same_samples_at_first(source, fork, samples_of):
    forked = fork(
        f"{source}@2", "engine.lr=0.01", "trainer.eval_every=0", "trainer.best=null", "trainer.lower_is_better=[]"
    )
    assert samples_of(forked)[3] == samples_of(source)[3]
    assert samples_of(forked)[4] != samples_of(source)[4]
    assert "other keys: engine.lr, trainer.eval_every, trainer.best" in log_of(forked)


def test_other_data_begin_at_their_first_prompt(source, fork, samples_of):
    """Two of the eight prompts a step: the source's third batch is of the rows after the first four."""
    uids = {step: [row["uid"] for row in rows] for step, rows in samples_of(source).items()}
    forked = fork(
        f"{source}@2",
        "data.batch_size=4",
        "trainer.total_steps=3",
        "trainer.eval_every=0",
        "trainer.best=null",
        "trainer.lower_is_better=[]",
    )
    assert {row["uid"] for row in samples_of(forked)[3]} == {*uids[1], *uids[2]}
    assert "data train: begins at its first prompt, as data.batch_size = 4 differs from the checkpoint's 2" in log_of(
        forked
    )


def test_a_fork_goes_on_without_its_source(source, fork, metrics_of, tmp_path, capsys):
    """With the same words, or its own config; also after the source has gone on, and when it is no longer there."""
    gone = tmp_path / "gone"
    shutil.copytree(source, gone)
    forked = fork(f"{gone}@2", "trainer.total_steps=3")
    other = fails(capsys, "--from", f"{gone}@4", f"run.dir={forked}", "trainer.total_steps=4")
    assert f"started from {gone}/checkpoints/step_00000002, not from {gone}/checkpoints/step_00000004" in other
    other = fails(capsys, "--from", str(source), f"run.dir={forked}", "trainer.total_steps=4")
    assert f"not from {source}" in other
    other = fails(capsys, "--from", str(source), f"run.dir={source}", "trainer.total_steps=5")
    assert f"started from its model, not from {source}" in other
    gone.rename(tmp_path / "moved")
    copy = tmp_path / "copy"
    shutil.copytree(forked, copy, symlinks=True)
    fork(f"{gone}@2", "trainer.total_steps=4")
    assert main(["train", "--config", f"{copy}/config.yaml", f"run.dir={copy}", "trainer.total_steps=4"]) == 0
    for folder in (forked, copy):
        assert [row["step"] for row in metrics_of(folder)] == [3, 4]
        assert_same_end(folder, source)
        assert f"source: {gone}/checkpoints/step_00000002" in (folder / "config.yaml").read_text()
        assert "lacks the lines" not in log_of(folder)
        assert "rows that the checkpoint counts" not in log_of(folder)


def test_a_fork_never_trains_from_scratch(source, fork, metrics_of, tmp_path, capsys):
    """Killed before its first checkpoint it starts from the source again; without the source it does not start."""
    gone = tmp_path / "gone"
    shutil.copytree(source, gone)
    forked = fork(f"{gone}@2")
    for file in ("checkpoints", "summary.json"):
        path = forked / file
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["train", "--config", f"{forked}/config.yaml", f"run.dir={forked}"]) == 0
    assert metrics_of(forked) == metrics_of(source)[3:]
    assert_same_end(forked, source)
    shutil.rmtree(forked / "checkpoints")
    (forked / "summary.json").unlink()
    gone.rename(tmp_path / "moved")
    for words in (["--from", f"{gone}@2"], ["--config", f"{forked}/config.yaml"]):
        message = fails(capsys, *words, f"run.dir={forked}")
        assert f"run.source={gone}/checkpoints/step_00000002 is no checkpoint, so no run can start from it" in message
    # A repeat in another folder is a fork too.
    message = fails(capsys, "--config", f"{forked}/config.yaml", f"run.dir={tmp_path}/again")
    assert "is no checkpoint" in message


@pytest.mark.parametrize(
    ("word", "fits"),
    [
        ("a", True),  # its newest checkpoint then
        ("a/checkpoints/best", True),
        ("a@2", True),
        ("a/checkpoints/step_00000002", True),
        ("a@3", False),
        ("b", False),
        ("b/checkpoints/best", False),
        (None, True),
    ],
)
def test_words_of_a_fork_that_has_begun(word, fits, tmp_path, monkeypatch):
    """It has a checkpoint of its own, and neither `a` nor `b` is there."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "fork" / "checkpoints" / "step_00000003"
    own.mkdir(parents=True)
    (own / "manifest.json").write_text("{}")
    source = str(tmp_path / "a" / "checkpoints" / "step_00000002")
    (tmp_path / "fork" / "config.yaml").write_text(f"run: {{source: {source}}}")
    config = compose(["algo=grpo", *([f"run.source={word}"] if word else [])], PluginManager.load())
    if fits:
        assert with_source(config, tmp_path / "fork", {}).run.source == source
    else:
        with pytest.raises(ConfigError, match=f"started from {source}, not from {word}"):
            with_source(config, tmp_path / "fork", {})


def test_a_fork_of_step_0_begins_with_an_evaluation(source, fork, metrics_of):
    """As RUN did; `best` is the checkpoint of that step, the best of RUN."""
    forked = fork(source / "checkpoints" / "best", "trainer.total_steps=1", "trainer.checkpoint_every=0")
    ours, theirs = metrics_of(forked), metrics_of(source)
    assert ours[0] == theirs[0]
    assert {name: theirs[1][name] for name in ours[1] if not name.startswith("eval/")}.items() <= ours[1].items()


def test_a_sweep_forks_each_job(source, fork, metrics_of, tmp_path):
    """Seed 0 is the source's; another one has other prompts, noise and states of the random generators."""
    swept = fork(
        f"{source}@2",
        "-m",
        "trainer.seed=0,1",
        "trainer.total_steps=3",
        "trainer.best=null",
        "trainer.lower_is_better=[]",
        to="swept",
    )
    assert metrics_of(swept / "0") == metrics_of(source)[3:4]
    assert metrics_of(swept / "1") != metrics_of(source)[3:4]
    assert "the seed has changed" in log_of(swept / "1")
    assert state(swept / "0")["random"] != state(swept / "1")["random"]
    fork(
        f"{source}@2",
        "-m",
        "trainer.seed=0,1",
        "trainer.total_steps=4",
        "trainer.best=null",
        "trainer.lower_is_better=[]",
        to="swept",
    )
    assert metrics_of(swept / "0") == metrics_of(source)[3:]
    assert len(metrics_of(swept / "1")) == 2


def test_rejection_sampling_keeps_its_own_rows(train_small, fork, tmp_path):
    options = ["algo=rejection_sampling", "algo.samples=2", "algo.top_k=1", "algo.threshold=-1", "algo.keep=top_k"]
    train_small(tmp_path / "rs", *options, *STEPS, "trainer.total_steps=3")
    fork(f"{tmp_path}/rs@2")
    kept = [json.loads(line) for line in (tmp_path / "rs" / "kept.jsonl").read_text().splitlines()]
    own = [json.loads(line) for line in (tmp_path / "fork" / "kept.jsonl").read_text().splitlines()]
    assert own == [row for row in kept if row["step"] == 3]


def test_a_role_that_the_checkpoint_lacks_starts_from_its_model(source, fork, forget, tmp_path):
    lacking = tmp_path / "lacking"
    shutil.copytree(source, lacking)
    saved = lacking / "checkpoints" / "step_00000002"
    for name in json.loads((saved / "manifest.json").read_text())["files"]:
        if name.startswith("actor/"):
            forget(saved, name)
    shutil.rmtree(saved / "actor")
    forked = fork(f"{lacking}@2", "trainer.total_steps=3")
    assert "actor: the checkpoint has no such role, so it starts from its model" in log_of(forked)


def test_a_role_that_is_deleted_meanwhile_is_an_error(source, tmp_path):
    """As by a source that still trains, and keeps few checkpoints."""
    run = tmp_path / "run"
    shutil.copytree(source, run)
    plugins = PluginManager.load()
    config = from_yaml((run / "config.yaml").read_text(), plugins)
    checkpoint = run / "checkpoints" / "step_00000002"
    opened = Source(checkpoint, config, plugins)
    assert opened.role("actor") == checkpoint / "actor"
    assert opened.role("critic") is None
    shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="'actor' starts, has been deleted meanwhile"):
        opened.role("actor")


def test_what_cannot_be_forked(source, tmp_path, capsys):
    into = f"run.dir={tmp_path / 'fork'}"
    assert "and trainer.total_steps = 4, which counts from the start" in fails(capsys, "--from", str(source), into)
    message = fails(capsys, "--from", f"{source}@3", into)
    assert (
        f"step_00000003 is no checkpoint, so no run can start from it; {source} has those of the steps 0, 2, 4"
        in message
    )
    message = fails(capsys, "--from", str(source), "algo=ppo", into)
    assert "leave out the saved config: algo=ppo model.path=RUN/checkpoints/NAME/actor/model" in message
    message = fails(capsys, "algo=ppo", f"run.source={source}", "cluster=in_process", into)
    assert f"begin algo=ppo with its model: model.path={source}/checkpoints/step_00000004/actor/model" in message
    assert "holds no run (config.yaml)" in fails(capsys, "--from", str(tmp_path), into)
    assert "leave one out" in fails(capsys, "--from", str(source), "--config", f"{source}/config.yaml", into)
    message = fails(capsys, "--from", f"{source}@4", "-m", "trainer.seed=0,1", into)
    assert "give at least 5" in message
    assert not (tmp_path / "fork").exists()


def test_only_what_is_needed_is_verified(source, fork, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    saved = damaged / "checkpoints" / "step_00000002"
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["other/weights"] = {"bytes": 1, "sha256": ""}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    fork(f"{damaged}@2", "trainer.total_steps=3")
    (saved / "actor" / "engine.json").write_text("{}")
    message = fails(capsys, "--from", f"{damaged}@2", f"run.dir={tmp_path}/two")
    assert "step_00000002 is damaged: actor/engine.json has 2 bytes" in message


def test_words_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert target_of("runs/a") == tmp_path / "runs/a"
    assert target_of("runs/a@12") == tmp_path / "runs/a/checkpoints/step_00000012"
    assert target_of("runs/a/checkpoints/best") == tmp_path / "runs/a/checkpoints/best"
    (tmp_path / "a@3").mkdir()
    assert target_of("a@3") == tmp_path / "a@3"
    plugins = PluginManager.load()
    assert source_step(compose(["algo=grpo"], plugins)) == 0
    assert source_step(compose(["algo=grpo", "run.source=/a/checkpoints/step_00000012"], plugins)) == 12
