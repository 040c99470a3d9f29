"""`rlcore.train` and `rlcore.load_run`: the command line's runs, from a program."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rlcore_grpo import GRPO

import rlcore
from rlcore import AlgorithmSpec, ConfigError, DataError, PluginError, hookimpl
from rlcore.cli import main
from rlcore.data.given import encode_rows

CLOCK = ("time/", "timeline/", "throughput/")


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(folder: Path) -> list[dict]:
    """Return a run's metrics without those of the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in lines(folder / "metrics.jsonl")]


def samples(folder: Path) -> list[dict]:
    return [row for file in sorted((folder / "samples").iterdir()) for row in lines(file)]


# Training


def test_a_run_has_the_numbers_of_the_command_line(by_command, in_python):
    assert numbers(in_python.folder) == numbers(by_command)
    assert samples(in_python.folder) == samples(by_command)
    assert {row["reward/mean"] for row in numbers(by_command)[1:]} != {0.0}


def test_metrics_and_samples_are_frames(in_python):
    metrics = in_python.metrics
    assert list(metrics["step"]) == [0, 1, 2, 3]  # 0: the evaluation before
    assert math.isnan(metrics["reward/mean"][0])
    written = [row["reward/mean"] for row in lines(in_python.folder / "metrics.jsonl")[1:]]
    assert list(metrics["reward/mean"][1:]) == written
    frame = in_python.samples
    assert list(frame["step"]) == [1] * 4 + [2] * 4 + [3] * 4
    assert set(frame["prompt_text"].str.contains("+", regex=False)) == {True}
    assert list(frame["scores"]) == [row["scores"] for row in samples(in_python.folder)]


def test_metrics_that_are_not_finite_and_a_line_that_is_being_written(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: x\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": "nan", "b": "-inf"}\n{"step": 2, "a"')
    run = rlcore.load_run(tmp_path)
    assert list(run.metrics["step"]) == [1]
    assert math.isnan(run.metrics["a"][0])
    assert run.metrics["b"][0] == -math.inf
    assert (run.summary, len(run.samples)) == ({}, 0)


def test_summary_is_the_file(in_python):
    assert in_python.summary == json.loads((in_python.folder / "summary.json").read_text())
    assert in_python.summary["status"] == "finished"
    assert repr(in_python) == f"RunResult({in_python.folder}, finished, 3 steps)"


def test_given_rows_are_in_the_run_folder(in_python):
    (path,) = re.findall(r"^  path: (.*/rows/.*)$", (in_python.folder / "config.yaml").read_text(), re.MULTILINE)
    folder = Path(path)
    assert folder.parent == in_python.folder / "rows"
    assert [row["prompt"] for row in lines(folder / "test.jsonl")] == ["2+2=", "5+3=", "11+1="]


def test_an_interrupted_run_is_returned_and_the_same_call_goes_on(case, in_python, tmp_path, capsys):
    class Interrupt:
        @hookimpl
        def rlcore_step_end(self, step):
            if step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    stopped = case.train(tmp_path / "run", callbacks=[Interrupt()])
    assert (stopped.summary["status"], stopped.summary["steps"]) == ("interrupted", 1)
    assert list(stopped.metrics["step"]) == [0, 1]
    config = str(tmp_path / "run" / "config.yaml")
    for command in (["train", "--config", config, f"run.dir={tmp_path / 'run'}"], ["eval", str(tmp_path / "run")]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "plugin 'python.score', which was given in Python: give it again, with rlcore.train(" in said
    with pytest.raises(ConfigError, match=r"another config; differing: data\.path"):
        case.train(tmp_path / "run", data=case.rows[1:])
    resumed = case.train(tmp_path / "run")
    assert resumed.summary["status"] == "finished"
    assert numbers(resumed.folder) == numbers(in_python.folder)


# What can be done with a run


def test_evaluate_is_the_evaluation_of_the_command_line(by_command, in_python, capsys):
    assert main(["eval", str(by_command), "trainer.eval_samples=2"]) == 0
    printed = {line.split()[0]: float(line.split()[1]) for line in capsys.readouterr().out.splitlines()}
    for run in (in_python, rlcore.load_run(by_command)):
        metrics = run.evaluate(**{"trainer.eval_samples": 2})
        assert {name: float(f"{metrics[f'eval/{name}']:.4g}") for name in printed} == printed
        assert metrics["eval/samples"] == 6


def test_evaluate_on_other_rows_with_another_reward(in_python):
    rows = [{"prompt": f"{number}+1="} for number in range(4)]
    metrics = in_python.evaluate(rows, reward={lambda prompt, response, answer: len(prompt): 0.5}, tracker="none")
    assert (metrics["eval/samples"], metrics["eval/score"]) == (4.0, 2.0)


def test_a_run_whose_reward_is_not_given_again_cannot_be_evaluated(in_python):
    run = rlcore.load_run(in_python.folder)
    with pytest.raises(PluginError, match=r"'python\.score', which was given in Python.*evaluate\(reward=\.\.\.\)"):
        run.evaluate()


def test_generate_and_export_give_the_same_model(in_python, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = rlcore.load_run(in_python.folder).export(tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = ["3+4=", "12+5="]
    expected = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(tokens, skip_special_tokens=True))
    assert rlcore.load_run(in_python.folder).generate(prompts, temperature=0.0, response_len=4) == expected
    with pytest.raises(ConfigError, match="exists already"):
        in_python.export(folder)
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.temprature'. Did you mean 'rollout\.temperature'"):
        in_python.generate(prompts, temprature=0.0)


# Errors


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rollout.respons_len": 4}, "unknown key 'rollout.respons_len'. Did you mean 'rollout.response_len'?"),
        ({"clustr": "in_process"}, "unknown key 'clustr'. Did you mean 'cluster'?"),
        ({"cluster": "in_proces"}, "cluster=in_proces is unknown. Did you mean 'in_process'?"),
        ({"trainer.total_steps": "many"}, "trainer.total_steps"),
        ({"algorithm": "ppo"}, "choose the algorithm with algo=NAME"),
        ({"model.path": "x"}, "model.path: given twice"),
        ({"data": "arithmetics", "eval_data": None}, "data=arithmetics is unknown. Did you mean 'arithmetic'?"),
        ({"data": "arithmetic"}, "eval_data goes with rows as `data`"),
        ({"reward": 5}, "reward: 5 is neither a function nor the name of a reward"),
        ({"reward": "gsm8"}, "reward.functions = 'gsm8' is not installed. Did you mean 'gsm8k'?"),
        ({"reward": [len, len]}, "two rewards are called 'python.len'"),
        ({"reward": lambda prompt: 1.0}, "reward 'python.lambda' cannot be called with (prompt, response, answer)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_named(case, given, text, tmp_path):
    with pytest.raises(ConfigError) as caught:
        case.train(tmp_path / "run", **given)
    assert text in str(caught.value)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_function_that_cannot_be_sent(case, tmp_path):
    lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"'python\.lambda' cannot be sent to its own process: TypeError: cannot pickle"
    ):
        case.train(tmp_path / "run", reward=lambda prompt, response, answer: lock.acquire())


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": {1}}], "data, row 1, column 'answer': {1} cannot"),
        ([{"prompt": "a", "answer": math.nan}], "data, row 0, column 'answer': nan cannot be written as JSON"),
        ([{"prompt": "a", 3: "b"}], "data, row 0: the column 3 is a int"),
        (["a"], "data, row 0: 'a' is a str; a row is a dict of columns"),
        ({"train": [], "test": []}, "data is {'train': [], 'test': []}; give a list of dicts, or one split"),
        (5, "data is 5; give a list of dicts"),
        ([], "data has no rows"),
    ],
    ids=["set", "nan", "name", "text", "splits", "number", "empty"],
)
def test_rows_that_cannot_be_written(case, rows, text, tmp_path):
    with pytest.raises(DataError) as caught:
        case.train(tmp_path / "run", data=rows)
    assert text in str(caught.value)


def test_a_data_set_of_datasets_is_its_rows(case):
    from datasets import Dataset

    assert encode_rows(Dataset.from_list([*case.rows]), "data") == encode_rows(case.rows, "data")


def test_rows_are_not_written_into_a_folder_of_others(case, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files but no run"):
        case.train(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"is no run folder: it has no config\.yaml"):
        rlcore.load_run(tmp_path)


class Unmarked:
    def rlcore_step_end(self, step):
        pass


class Failing:
    @hookimpl
    def rlcore_check_config(self, config):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (Unmarked, "callbacks: Unmarked is a class; give an object of it, Unmarked()"),
        (
            Unmarked(),
            "plugin 'Unmarked' (an object given in Python): rlcore_step_end() has the name of a hook but is not",
        ),
        (Failing(), "plugin 'Failing' (an object given in Python): rlcore_check_config() failed: ValueError: no"),
        (object(), "plugin 'object' (an object given in Python): it implements no hook"),
    ],
    ids=["class", "unmarked", "failing", "no hook"],
)
def test_errors_name_the_callback(case, callback, text, tmp_path):
    with pytest.raises((ConfigError, PluginError)) as caught:
        case.train(tmp_path / "run", callbacks=[callback])
    assert text in str(caught.value)
    assert "-p no:" not in str(caught.value)


def test_an_object_brings_an_algorithm(case, in_python, tmp_path):
    class Cell:
        @hookimpl
        def rlcore_algorithm(self):
            return AlgorithmSpec("mine", GRPO)

    given = {"data": case.rows, "eval_data": case.held_out, "reward": case.score, **case.settings}
    run = rlcore.train(algo="mine", callbacks=[Cell()], run_dir=tmp_path, **given)
    assert numbers(run.folder) == numbers(in_python.folder)
    again = rlcore.load_run(tmp_path, callbacks=[Cell()]).evaluate(reward=case.score)
    assert again == in_python.evaluate()
    with pytest.raises(PluginError, match=r"'python\.score', which was given in Python"):
        rlcore.load_run(tmp_path, callbacks=[Cell()]).evaluate()


# Programs

SCRIPT = """
import rlcore

{reward}

class Counter:
    steps = 0

    @rlcore.hookimpl
    def rlcore_step_end(self, step, metrics):
        self.steps += 1

counter = Counter()
settings = {{**{settings!r}, "trainer.eval_every": 0, "trainer.total_steps": 2}}
for cluster in ("in_process", "local"):
    settings["cluster"] = cluster
    given = {{"algo": "grpo", "model": "tiny", "data": {rows!r}, "reward": {{score: 2.0}}, "callbacks": [counter]}}
    result = rlcore.train(run_dir=cluster, **given, **settings)
    assert result.samples["reward_error"].sum() == 0
    assert set(result.samples["scores"]) <= {{0.0, 1.0, 2.0}}
    print(cluster, result.summary["status"], counter.steps)
"""


@pytest.mark.ray
def test_a_script_without_a_guard_in_process_and_on_ray(case, tmp_path):
    text = SCRIPT.format(reward=case.reward, rows=case.rows, settings=case.settings)
    (tmp_path / "script.py").write_text(text)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["in_process finished 2", "local finished 4"]
    assert [row["scores"] for row in samples(tmp_path / "local")] == [
        row["scores"] for row in samples(tmp_path / "in_process")
    ]
