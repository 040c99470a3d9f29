"""`rlcore COMMAND ...` in this process: output, messages and exit status."""

import json

import pytest
import yaml

from rlcore.cli import main

ECHO = ["algo=echo", "algo.target=you"]


def test_train_shows_the_composed_config(stand_in, capsys):
    assert main(["train", *stand_in, *ECHO, "data=riddles", "algo.mode=loud", "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["algorithm"] == "echo"
    assert shown["algo"] == {"target": "you", "group_size": 4, "mode": "loud"}
    assert shown["data"]["name"] == "riddles"


def test_options_may_stand_between_overrides(stand_in, capsys):
    assert main([*stand_in, "train", "algo=echo", "--cfg", "job", "algo.target=you", "--trace-hooks"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["algo"]["target"] == "you"
    assert "hook rlcore_algorithm stand_in" in printed.err


def test_config_checks_and_shows(stand_in, capsys):
    assert main(["config", *stand_in, *ECHO, "tracker=none"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["tracker"]["use"] == []
    assert main(["config", *stand_in, *ECHO, "cluster.executor=in_process", "cluster.workers=2"]) == 2
    assert "cluster.workers must be 1" in capsys.readouterr().err


def test_saved_config_with_overrides(stand_in, capsys, tmp_path):
    assert main(["config", *stand_in, *ECHO, "trainer.seed=5", "run.dir=runs/a"]) == 0
    saved = tmp_path / "config.yaml"
    saved.write_text(capsys.readouterr().out)
    assert main(["config", *stand_in, "--config", str(saved), "algo.mode=loud"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    expected = yaml.safe_load(saved.read_text())
    expected["algo"]["mode"] = "loud"
    expected["run"]["dir"] = None
    assert shown == expected


def test_own_config_dir(stand_in, capsys, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer: {total_steps: 3}\n")
    assert main(["config", *stand_in, *ECHO, "experiment=mine", "--config-dir", str(tmp_path)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["total_steps"] == 3
    assert main(["config", *stand_in, *ECHO, "--config-dir", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["trian"],
            "unknown command 'trian'. Did you mean 'train'? Commands: compare, config, eval, export, new-plugin, "
            "plugins, samples, serve, train, hello. A plugin may bring another: pip install rlcore-plugin-trian",
        ),
        (["plugins", "test", "grpo", "--set", "a=b"], "pip install rlcore-plugin-testing"),
        (["plugins", "tset", "grpo"], "unknown words 'tset grpo': rlcore plugins takes none"),
        (["plan", *ECHO, "plan.gpus=8"], "A plugin may bring another: pip install rlcore-plugin-plan"),
        (["train", *ECHO, "cluster.pools=auto"], "cluster.pools=auto needs a plugin that plans: pip install rlcore-"),
        (["train", "algo=ecko"], "algo=ecko is unknown. Did you mean 'echo'?"),
        (["train", *ECHO, "data=ridles"], "data=ridles is unknown. Did you mean 'riddles'?"),
        (
            ["train", *ECHO, "trainer.total_step=3"],
            "unknown key 'trainer.total_step'. Did you mean 'trainer.total_steps'",
        ),
        (["train", *ECHO, "trainer.total_steps"], "cannot read 'trainer.total_steps'"),
        (["train", *ECHO, "trainer.seed=1,2"], "add --multirun"),
        (["train", *ECHO, "experiment=quikstart"], "experiment=quikstart is unknown. Did you mean 'quickstart'?"),
        (["train"], "no algorithm is chosen: add algo=NAME, one of echo"),
        (["train", "algo=echo"], "algo.target must be given"),
        (["train", *ECHO, "-m", "trainer.seed=1,x"], "trainer.seed = 'x' has the wrong type"),
        (["train", *ECHO, "-m", "--cfg", "job"], "--cfg and --multirun exclude each other"),
        (["train", "--config", "absent.yaml"], "'absent.yaml' cannot be read: No such file"),
        (["train", *ECHO, "-p", "absent.py"], "plugin file 'absent.py' does not exist"),
        (["train", *ECHO, "-p", "no:absent"], "no:absent blocks nothing"),
        (["eval"], "rlcore eval RUN_OR_MODEL"),
        (["eval", "data=riddles"], "rlcore eval RUN_OR_MODEL"),
        (["eval", "a", "b", "c", "data=riddles"], "two runs or models at a time, and a, b, c are 3; compare them in"),
        (["eval", "a", "data=riddles", "b"], "'b' comes after the override 'data=riddles'; put runs and models before"),
        (["compare", "a", "data=riddles"], "rlcore compare needs two runs or models, and a was given"),
        (["compare", "a", "b", "--training"], "a holds no run (config.yaml); rlcore compare --training needs the"),
        (["compare", "a", "b", "--training", "data=riddles"], "reads what two runs have written; leave out overrides"),
        (["train", "--from", "no/run", "run.dir=b"], "no/run holds no run (config.yaml); give RUN, RUN@STEP or"),
        (
            ["eval", "no/such/folder"],
            "'no/such/folder' does not exist: it must be a folder with config.yaml (a run) or",
        ),
    ],
)
def test_wrong_input_is_one_message_and_status_2(argv, message, stand_in, capsys):
    assert main([*stand_in, *argv]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("rlcore: ")
    assert message in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("argv", [["train", "--cfg", "hydra"], ["plugins", "--jsn"], ["--wrong"]])
def test_unknown_options(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: rlcore" in capsys.readouterr().err


def test_eval_of_a_folder_that_holds_neither(stand_in, capsys, tmp_path):
    assert main([*stand_in, "eval", str(tmp_path)]) == 2
    assert "holds neither config.yaml (a run) nor config.json (a Hugging Face model)" in capsys.readouterr().err


def test_eval_takes_a_folder_with_the_characters_of_an_override(stand_in, capsys, tmp_path):
    (tmp_path / "lr=1e-5,seed=1").mkdir()
    assert main([*stand_in, "eval", str(tmp_path / "lr=1e-5,seed=1")]) == 2
    assert "lr=1e-5,seed=1' holds neither config.yaml (a run) nor" in capsys.readouterr().err


def test_plugins_as_json(stand_in, capsys):
    assert main(["plugins", *stand_in, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["grpo"]["state"] == "blocked"
    assert (rows["grpo"]["distribution"], rows["grpo"]["kind"]) == ("rlcore", "algorithm")
    row = rows["stand_in"]
    assert (row["state"], row["kind"], row["distribution"]) == ("loaded", "local", None)
    assert len(row["sha256"]) == 64
    assert row["file"].endswith("stand_in.py")
    assert row["hooks"][0] == "rlcore_algorithm"
    assert row["hooks"][-1] == "rlcore_check_config"


def test_plugins_as_text(stand_in, capsys):
    assert main(["plugins", *stand_in]) == 0
    printed = capsys.readouterr().out
    assert "grpo  [algorithm, blocked]  rlcore " in printed
    assert "stand_in  [local, loaded]  sha256 " in printed
    assert "hooks  rlcore_algorithm, rlcore_rewards, " in printed


def test_help_of_an_algorithm_shows_its_keys(stand_in, capsys):
    assert main(["train", *stand_in, "algo=echo", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "algo.target = required  [str]\n      what to say" in printed
    assert "algo.group_size = 4  [int]\n      responses per prompt (>= 2, <= 64)" in printed
    assert 'algo.mode = "quiet"  [loud | quiet]' in printed
    assert "trainer.total_steps = 100  [int]" in printed
    assert "--multirun" in printed
    assert main(["train", *stand_in, "algo=ecko", "--help"]) == 2
    assert "'ecko' is not installed. Did you mean 'echo'?" in capsys.readouterr().err


def test_plugin_command_gets_its_arguments(stand_in, capsys):
    assert main([*stand_in, "hello", "a", "--help", "b=c"]) == 7
    assert capsys.readouterr().out == "hello a --help b=c\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rlcore 0.")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlcore ", "train eval compare config plugins new-plugin serve export samples plan"),
        ("rlcore pl", "plugins plan"),
        ("rlcore plugins ", "test"),
        ("rlcore train algo=gr", "algo=grpo"),
        ("rlcore train algo=grpo clus", "cluster. cluster="),
        ("rlcore train cluster=", "cluster=in_process cluster=local"),
        ("rlcore train trainer.total_", "trainer.total_steps="),
        ("rlcore eval runs/a rollout.temp", "rollout.temperature="),
        ("rlcore eval runs/a runs/b rollout.temp", "rollout.temperature="),
        ("rlcore train experiment=q", "experiment=quickstart"),
    ],
)
def test_shell_completion(line, expected, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.strip() == expected


def test_shell_completion_script(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/rlcore"])
    assert main(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("hydra_bash_completion rlcore")
