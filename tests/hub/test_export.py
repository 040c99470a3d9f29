"""`rlcore export`: a model with its card in a folder and on the hub. About 6 CPU seconds."""

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.cli import main
from rlcore.commands.model_card import model_card

SMALL = [
    *("algo=grpo", "algo.group_size=2", "cluster=in_process", "tracker=none", "data.batch_size=2", "data.max_rows=16"),
    *("data.eval_size=4", "rollout.response_len=3", "trainer.total_steps=2", "trainer.eval_every=1"),
    "trainer.checkpoint_every=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two steps, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    assert main(["train", *SMALL, f"run.dir={folder}"]) == 0
    return folder


def metrics(run: Path, step: int) -> dict:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


def test_a_step_is_exported_with_its_card(run, tmp_path, capfd):
    for step in (1, 2):
        assert main(["export", str(run), str(tmp_path / f"{step}"), "--step", str(step)]) == 0
        saved = run / "checkpoints" / f"step_{step:08d}" / "actor" / "model" / "model.safetensors"
        assert (tmp_path / f"{step}" / "model.safetensors").read_bytes() == saved.read_bytes()
        line = metrics(run, step)
        low, high = line["eval/accuracy_low"], line["eval/accuracy_high"]
        card = (tmp_path / f"{step}" / "README.md").read_text()
        assert f"| {line['eval/accuracy']:.3f} [{low:.3f}, {high:.3f}] |\n" in card
        assert f"| accuracy on | at step 0 | at step {step} |" in card
        assert f"| steps | {step}, of 2 prompts each |" in card
        assert '"group_size": 2' in card
        assert str(tmp_path.parent) not in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "2")
    assert tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "2").generation_config.eos_token_id == 1


def test_what_cannot_be_exported_is_refused(run, tmp_path, capfd):
    target = str(tmp_path / "out")
    checkpoint = str(run / "checkpoints" / "step_00000001")
    for options, said in {
        (str(run),): "nowhere to export to",
        (str(run), target, "--step", "7"): "--step=7: the run .* it has those of the steps 1, 2",
        (checkpoint, target, "--step", "1"): "is a checkpoint already; leave out --step=1",
        (str(run), target, "--private"): "--private is for the repository",
        (str(run), "--push", "no-organisation"): "--push=no-organisation is no name on the hub",
        (str(run), "--push", "org/name@main"): "write it as ORG/NAME",
    }.items():
        assert main(["export", *options]) == 2
        error = capfd.readouterr().err
        assert re.search(said, error), error
    assert not Path(target).exists()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's upload of a weight file
def test_a_run_is_pushed_and_read_back_by_its_name(run, tmp_path, hub, capfd):
    assert main(["export", str(run), "--push", "org/sums", "--private"]) == 0
    assert f"model: {hub.url}/org/sums/commit/" in capfd.readouterr().out
    assert hub.private == {"org/sums": True}
    assert hub.messages == ["A checkpoint of a run of rlcore"]
    (files,) = hub.repositories["model", "org/sums"].commits.values()
    saved = run / "checkpoints" / "step_00000002" / "actor" / "model"
    for path in saved.iterdir():
        assert files[path.name] == path.read_bytes()
    assert "trained with grpo" in files["README.md"].decode()
    assert AutoModelForCausalLM.from_pretrained("org/sums").num_parameters() > 0
    # Again, beside a folder: another commit of the same repository.
    assert main(["export", str(run), str(tmp_path / "here"), "--dtype", "bf16", "--push", "org/sums"]) == 0
    assert len(hub.repositories["model", "org/sums"].commits) == 2
    assert (tmp_path / "here" / "README.md").is_file()


def test_a_refused_push_names_the_remedy_before_anything_is_written(run, tmp_path, hub, capfd):
    hub.token = "hf_other"
    assert main(["export", str(run), str(tmp_path / "out"), "--push", "org/sums"]) == 2
    said = capfd.readouterr().err
    assert "org/sums cannot be written on the hub" in said
    assert "HTTP 403; log in with `hf auth login` as somebody who may write to org" in said
    assert "hf_secret" not in said
    assert not (tmp_path / "out").exists()
    hub.close()
    assert main(["export", str(run), "--push", "org/sums"]) == 2
    assert "see whether it can be reached" in capfd.readouterr().err


def test_a_run_whose_facts_are_lost_is_not_exported_in_silence(run, tmp_path, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "versions.json").write_text("{")
    assert main(["export", str(copy), str(tmp_path / "out")]) == 1
    assert "versions.json cannot be read" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_of_the_hub_are_in_the_card_and_paths_of_this_machine_are_not():
    commit = "a" * 40
    values = {
        "algorithm": "safe_rlhf",
        "algo": {"cost_model": "/home/me/secret/cost", "ptx_path": f"org/rows@{commit}", "each": ["/home/me/a"]},
        "model": {"path": f"org/base@{commit}", "dtype": "bf16"},
        "data": {
            **{"name": "arithmetic", "path": None, "batch_size": 8},
            "mix": {
                "one": {"data": {"name": "file", "path": "/home/me/secret/rows.jsonl"}},
                "two": {"data": {"name": "gsm8k", "path": f"openai/gsm8k@{commit}"}},
            },
        },
        "engine": {"lr": 1e-6, "schedule": "cosine"},
        "rollout": {"temperature": 0.7, "response_len": 32},
        "trainer": {"seed": 3},
    }
    lines = [
        {"step": 0, "eval/one/accuracy": 0.25, "eval/one/accuracy_low": 0.1, "eval/one/accuracy_high": 0.4},
        {"step": 4, "eval/one/accuracy": 0.5, "eval/two/accuracy": 1.0},
        {"step": 9, "eval/one/accuracy": 0.75},
    ]
    versions = {"rlcore": "1", "torch": "2", "transformers": "3"}
    card = model_card(values, lines, versions, 6, role="actor", kind="adapter")
    assert "base_model: org/base\n" in card
    assert "datasets:\n- openai/gsm8k\n" in card
    assert "library_name: peft\n" in card
    assert "`data=file` (`rows.jsonl`), `data=gsm8k` (openai/gsm8k at `aaaaaaaaaaaa`)" in card
    assert "| one | 0.250 [0.100, 0.400] | 0.500 |" in card
    assert "| two | not evaluated | 1.000 |" in card
    assert "/home/me" not in card
    assert '"ptx_path": "org/rows@' in card
    critic = model_card(values, lines, versions, 6, role="critic", kind="model")
    assert "accuracy" not in critic
    assert "pipeline_tag" not in critic
