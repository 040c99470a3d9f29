"""A run on a model of the hub: its commit is kept, whatever its branch does; commands on names. About 12 s."""

import json
from dataclasses import replace

import pytest
import yaml

from rlcore.assets import TINY
from rlcore.cli import main
from rlcore.config import DataConfig, ModelConfig, compose
from rlcore.config.files import same_run
from rlcore.errors import ConfigError
from rlcore.model_folder import model_path
from rlcore.plugins import PluginManager
from rlcore.training.trainer import train

SMALL = [
    *("cluster=in_process", "tracker=none", "algo=grpo", "algo.group_size=2", "model.path=acme/tiny"),
    *("data.batch_size=2", "rollout.response_len=4", "engine.lr=1e-3", "trainer.eval_every=0"),
    *("trainer.total_steps=2", "trainer.checkpoint_every=1"),
]


def run_in(folder, *overrides, plugins=None):
    plugins = plugins or PluginManager.load()
    return train(compose([*SMALL, f"run.dir={folder}", *overrides], plugins), plugins)


def rows(folder):
    """Return the metrics of each step, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key and "time" not in key} for line in lines]


@pytest.fixture
def branches(hub, tiny):
    """Push a first revision; return its commit, and a function that moves the branch to another model."""
    first = hub.push("acme/tiny", tiny)
    wider = json.loads(tiny["config.json"])

    def move() -> str:
        # Weights of half the size would train to other numbers, and a longer context is another config.
        from safetensors.torch import load, save

        halved = save(
            {name: tensor * 0.5 for name, tensor in load(tiny["model.safetensors"]).items()}, {"format": "pt"}
        )
        config = json.dumps({**wider, "max_position_embeddings": 999}).encode()
        return hub.push("acme/tiny", {**tiny, "model.safetensors": halved, "config.json": config})

    return first, move


@pytest.mark.e2e
def test_a_resumed_run_reads_the_commit_that_it_began_with(hub, branches, stopping, tmp_path):
    first, move = branches
    frozen = "roles.ref.model=acme/tiny"
    run_in(tmp_path / "straight", frozen, "algo.kl_coef=0.1")
    with pytest.raises(RuntimeError, match="stop here"):
        run_in(tmp_path / "run", frozen, "algo.kl_coef=0.1", plugins=stopping.load())
    second = move()
    assert compose(SMALL, PluginManager.load()).model.path == f"acme/tiny@{second}"
    with pytest.raises(ConfigError, match=r"another config; differing: model\.path"):
        run_in(tmp_path / "run", frozen, "algo.kl_coef=0.1", "model.path=acme/tiny@main")
    run_in(tmp_path / "run", frozen, "algo.kl_coef=0.1")
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["model"]["path"] == saved["roles"]["ref"]["model"] == f"acme/tiny@{first}"
    assert len(rows(tmp_path / "run")) == 2
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")
    written = json.loads(
        (tmp_path / "run" / "checkpoints" / "step_00000002" / "actor" / "model" / "config.json").read_text()
    )
    assert written["max_position_embeddings"] != 999


@pytest.mark.e2e
def test_a_relative_folder_is_no_name_in_another_directory(hub, tiny, tmp_path, monkeypatch, capsys):
    """A run on folders here, evaluated from elsewhere, asks nobody for models and rows of the same name."""
    hub.push("acme/tiny", tiny)
    hub.push("acme/sums", {"train.jsonl": b"{}\n"}, kind="dataset")
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "acme" / "sums").mkdir(parents=True)
    elsewhere.mkdir()
    (home / "acme" / "tiny").symlink_to(TINY)
    for name in ("train", "test"):
        rows = [{"prompt": f"{len(name)}+{n}=", "answer": str(len(name) + n)} for n in range(4)]
        (home / "acme" / "sums" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(home)
    files = ["data=file", "data.path=acme/sums", "reward=arithmetic", "trainer.total_steps=1"]
    run_in(home / "run", *files)
    saved = yaml.safe_load((home / "run" / "config.yaml").read_text())
    assert (saved["model"]["path"], saved["data"]["path"]) == ("./acme/tiny", "./acme/sums")
    assert same_run(compose([*SMALL, *files], PluginManager.load()), build_saved(home / "run")) == []
    monkeypatch.chdir(elsewhere)
    assert main(["eval", str(home / "run"), "cluster=in_process"]) == 2
    assert "data.path=./acme/sums: there is no such file or folder" in capsys.readouterr().err
    assert hub.requests == []


def build_saved(folder):
    """Return the config of a run folder, with folders as they were written before they got `./`."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    return replace(
        compose([*SMALL, "data=file", "reward=arithmetic", "trainer.total_steps=1"], PluginManager.load()),
        model=ModelConfig(**{**values["model"], "path": "acme/tiny"}),
        data=DataConfig(**{**values["data"], "path": "acme/sums"}),
    )


def test_nothing_starts_when_the_weights_break_off(hub, branches, tmp_path):
    hub.breaks = "model.safetensors", 500
    with pytest.raises(ConfigError, match=r"cannot be fetched from the hub .*: HTTP 500\. Start again, which keeps"):
        run_in(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    hub.status = 200
    model_path(compose(SMALL, PluginManager.load()).model.path)
    assert hub.downloads().count("model.safetensors") == 3  # half of it, an error, all of it
    assert hub.downloads().count("tokenizer.json") == 1


@pytest.mark.e2e
def test_commands_take_names(hub, branches, capsys):
    first, _ = branches
    small = ["data.max_rows=128", "data.eval_size=4", "rollout.response_len=4", "cluster=in_process"]
    assert main(["config", "algo=grpo", "model.path=acme/tiny"]) == 0
    assert f"path: acme/tiny@{first}" in capsys.readouterr().out
    assert main(["plan", "algo=grpo", "model.path=acme/tiny"]) == 0
    assert "model.safetensors" not in hub.downloads()
    assert main(["eval", "acme/tiny", *small]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["eval", "acme/absent", *small]) == 2
    assert "model.path=acme/absent is neither a folder here nor a model on the hub" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["model=Qwen/Qwen3-0.6B"], "is a value of model.path: model.path=Qwen/Qwen3-0.6B"),
        (["data=openai/gsm8k"], "a name on the hub: data=gsm8k data.path=openai/gsm8k"),
        (["data=acme/sums"], "a name on the hub: data=file data.path=acme/sums"),
        (["lr=1e-5"], "Did you mean 'engine.lr'?"),
        (["group_size=4"], "Did you mean 'algo.group_size'?"),
        (["engine.learning_rate=1e-5"], "Did you mean 'engine.lr'?"),
        (["model_path=x"], "Did you mean 'model.path'?"),
        (["num_generations=4"], "Did you mean 'algo.group_size'?"),
        (["engine.group_size=4"], "Did you mean 'algo.group_size'?"),
        (["trainer.totl_steps=4"], "Did you mean 'trainer.total_steps'?"),
        (["rollout.hf.batchsize=4"], "Did you mean 'rollout.hf.batch_size'?"),
    ],
)
def test_a_wrong_key_names_the_one_that_was_meant(words, meant):
    with pytest.raises(ConfigError) as caught:
        compose(["algo=grpo", *words], PluginManager.load())
    assert meant in str(caught.value)
