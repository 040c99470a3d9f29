"""Runs on several data sets: rewards, metrics and evaluations of each source, resuming, and the checks. About 20 s."""

import json
import re

import pytest

from rlcore.cli import main
from rlcore.config import compose
from rlcore.errors import ConfigError, DataError
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight
from rlcore.training.trainer import train

SUMS = [("3+4=", "7"), ("12+5=", "17"), ("9-2=", "7"), ("8+8=", "16"), ("15-6=", "9"), ("7+1=", "8")]
GRADES = [("30+4=", 0.25), ("6-6=", 0.5), ("2+2=", 0.75), ("5+3=", 1.5)]
REWARDS = """
def graded(prompt, response, answer, grade):
    return grade

def counted(prompt, response, answer, grade=-1.0):
    return grade
"""
RUN = [
    *("cluster=in_process", "tracker=none", "rollout.response_len=3", "data.batch_size=4"),
    *("engine.lr=1e-3", "trainer.samples_per_step=100", "trainer.total_steps=4"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    rows = [{"prompt": prompt, "answer": right, "chosen": right, "rejected": "0"} for prompt, right in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"task": prompt, "grade": grade} for prompt, grade in GRADES]
    (folder / "grades.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def source(files, name, **more):
    """A source's values, as a mix on the command line has them."""
    keys = {"sums": {"prompt_key": "prompt"}, "grades": {"prompt_key": "task", "system_prompt": "grade"}}[name]
    data = {"name": "file", "path": str(files / f"{name}.jsonl"), **keys, **more.pop("data", {})}
    return {"data": data, **more}


def reward(files, function):
    return {"path": f"{files / 'rewards.py'}:{function}"}


def as_option(value):
    """Return a value in hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_option(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) else str(value)


@pytest.fixture(scope="module")
def mix(files):
    sums = source(files, "sums", weight=3, reward={"functions": {"arithmetic": 1.0}})
    grades = source(files, "grades", weight=1, reward=reward(files, "graded") | {"pass_score": 0.5})
    return f"data.mix={as_option({'sums': sums, 'grades': grades})}"


def run(folder, *options, plugins=None):
    plugins = plugins or PluginManager.load()
    algo = [] if any(option.startswith("algo=") for option in options) else ["algo=grpo", "algo.group_size=2"]
    return train(compose([*RUN, *algo, f"run.dir={folder}", *options], plugins), plugins)


def check(*options):
    plugins = PluginManager.load()
    preflight(compose(["algo=grpo", "cluster=in_process", *options], plugins), plugins)


class Stopping(PluginManager):
    """Breaks at the end of step 3, whose checkpoint is not written yet."""

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 3:
            raise RuntimeError("stop here")


OPTIONS = ["trainer.eval_every=4", "trainer.checkpoint_every=2", "trainer.best=eval/grades/accuracy"]


@pytest.fixture(scope="module")
def straight(mix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, run(folder, mix, *OPTIONS)


def test_each_row_is_scored_by_the_functions_of_its_source(straight, samples_of):
    grades = dict(GRADES)
    for rows in samples_of(straight[0]).values():
        assert [row["mix_source"] for row in rows].count("sums") == 6
        assert [row["mix_source"] for row in rows].count("grades") == 2
        for row in rows:
            right = row["response_text"] == row["answer"]
            assert row["scores"] == (right if row["mix_source"] == "sums" else grades[row["prompt_text"]])


def test_metrics_of_each_source(straight, metrics_of, samples_of):
    samples = samples_of(straight[0])
    for metrics in metrics_of(straight[0])[1:]:
        for name, pass_score in (("sums", 1.0), ("grades", 0.5)):
            scores = [row["scores"] for row in samples[metrics["step"]] if row["mix_source"] == name]
            assert metrics[f"mix/{name}/samples"] == len(scores)
            assert metrics[f"mix/{name}/reward"] == pytest.approx(sum(scores) / len(scores))
            right = sum(score >= pass_score for score in scores) / len(scores)
            assert metrics[f"mix/{name}/accuracy"] == pytest.approx(right)
        assert metrics["data/sums/train_prompts"] == 5
        assert metrics["data/grades/held_out_prompts"] == 1


def test_the_held_out_prompts_of_each_source_are_an_evaluation_of_its_name(straight, metrics_of, capsys):
    folder, summary = straight
    evaluated = [row for row in metrics_of(folder) if "eval/sums/accuracy" in row]
    assert [row["step"] for row in evaluated] == [0, 4]
    assert all("eval/accuracy" not in row for row in evaluated)
    assert {row["eval/grades/samples"] for row in evaluated} == {1}
    assert len({row["eval/grades/score"] for row in evaluated}) == 1  # the grade of its held-out prompt
    assert evaluated[0]["eval/grades/score"] in dict(GRADES).values()
    assert summary["best"]["step"] == 0
    assert main(["eval", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^sums/accuracy .*^grades/accuracy ", printed, re.MULTILINE | re.DOTALL)


def test_a_resumed_run_equals_an_undisturbed_one(straight, mix, metrics_of, samples_of, tmp_path):
    with pytest.raises(RuntimeError, match="stop here"):
        run(tmp_path / "run", mix, *OPTIONS, plugins=Stopping.load())
    assert run(tmp_path / "run", mix, *OPTIONS)["steps"] == 4
    assert metrics_of(tmp_path / "run") == metrics_of(straight[0])
    assert samples_of(tmp_path / "run") == samples_of(straight[0])


def test_a_function_gets_no_columns_of_other_sources(files, samples_of, tmp_path):
    """`counted` has a default for a column that only the other source has, and None would take its place."""
    sums = source(files, "sums", reward=reward(files, "counted"))
    both = {"sums": sums, "grades": source(files, "grades", reward=reward(files, "counted"))}
    run(tmp_path / "run", f"data.mix={as_option(both)}", "trainer.eval_every=0", "trainer.total_steps=1")
    rows = samples_of(tmp_path / "run")[1]
    assert {row["scores"] for row in rows if row["mix_source"] == "sums"} == {-1.0}
    assert {row["scores"] for row in rows if row["mix_source"] == "grades"} <= set(dict(GRADES).values())


def test_the_runs_functions_score_sources_without_any_and_columns_of_scores_are_joined(files, samples_of, tmp_path):
    two = {"functions": {"arithmetic": 1.0, f"{files / 'rewards.py'}:counted": 0.5}}
    both = {"sums": source(files, "sums"), "grades": source(files, "grades", reward=two, data={"answer_key": "grade"})}
    options = [f"data.mix={as_option(both)}", "reward=arithmetic", "trainer.eval_every=0", "trainer.total_steps=1"]
    run(tmp_path / "run", *[option.replace(".py:", ".py\\:") for option in options])
    for row in samples_of(tmp_path / "run")[1]:
        if row["mix_source"] == "sums":
            assert row["score/rewards.counted"] is None
            assert row["scores"] == (row["response_text"] == row["answer"])
        else:
            assert row["scores"] == pytest.approx(row["score/arithmetic"] + 0.5 * row["score/rewards.counted"])


def test_an_algorithm_that_learns_pairs_takes_a_mix(files, metrics_of, tmp_path):
    """Its own evaluation reads the held-out prompts of all sources, here the rows of one file twice."""
    folder, copies = tmp_path / "run", source(files, "sums", data={"held_out_share": 0.3, "system_prompt": "copy"})
    both = {"sums": source(files, "sums"), "copies": copies}
    run(folder, "algo=dpo", f"data.mix={as_option(both)}", "trainer.eval_every=4")
    last = metrics_of(folder)[-1]
    assert 0 <= last["eval/accuracy"] <= 1
    assert not any(name.startswith(("eval/sums", "eval/copies")) for name in last)
    assert main(["eval", str(folder)]) == 0
    with pytest.raises(DataError, match=r"^data\.mix\.grades: data=file, split 'train', row 1: .*'chosen'"):
        run(tmp_path / "other", "algo=dpo", f"data.mix={as_option({'grades': source(files, 'grades')})}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["data.mix={b: {weight: 1}}"],
            r"^data\.mix\.b\.data has no name; give its data set, as data\.mix\.b\.data\.n",
        ),
        (["data.mix.a.data.batch_size=2"], r"^data\.mix\.a\.data\.batch_size=2: sources of data\.mix do not read"),
        (["data.mix.a.data.promt_key=x"], r"unknown key 'data\.mix\.a\.data\.promt_key'.* mean 'data\.mix\.a\.data\.p"),
        (["data.mix.a.wait=2"], r"unknown key 'data\.mix\.a\.wait'.*'data\.mix\.a\.weight'"),
        (["data.mix.a.weight=0"], r"^data\.mix\.a\.weight = 0 must be a number above 0"),
        (["data.mix.a.weight=-1"], r"data\.mix\.a\.weight = -1\.0 is out of bounds"),
        (["data.mix.a.weight=.inf"], r"data\.mix\.a\.weight"),
        (["data.mix.a.data.name=nothing"], r"data\.mix\.a\.data\.name"),
        (["data.mix.a.data.subset=main"], r"^data\.mix\.a\.data\.subset=main chooses in data\.mix\.a\.data\.path"),
        (
            ["data.mix.a.data.prompt_len=600"],
            r"^data\.mix\.a\.data\.prompt_len = 600 is more than data\.prompt_len = 512",
        ),
        (["data.mix.a.reward={functions: {maths: 1}}"], r"data\.mix\.a\.reward\.functions"),
        (["data.mix.a.reward={path: score}"], r"^data\.mix\.a\.reward\.path = 'score' must be FILE\.py:FUNCTION"),
        (["data.mix.a.reward={workers: 2}"], r"^data\.mix\.a\.reward\.workers=2: sources of data\.mix do not read"),
        (["data.mix={a b: {data: {name: arithmetic}}}"], r"data\.mix\.a b: the name is part of metrics"),
        (["data=file", "data.path=x.jsonl"], r"^data\.name=file is of one data set, and data\.mix has several"),
        (["data.max_rows=3"], r"^data\.max_rows=3 is of one data set, .* as data\.mix\.a\.data\.max_rows"),
        (["reward.model=tiny"], r"^reward\.model = tiny scores the responses to all prompts alike"),
        (["eval.sets={a: {data: {name: arithmetic}}}"], r"^'a' is a source of data\.mix and an evaluation of eval"),
        (["eval.sets={b: {samples: 2}}"], r"^eval\.sets\.b\.data has no name; with data\.mix the run has no data set"),
        (["trainer.best=eval/accuracy"], r"'eval/accuracy', which no evaluation .*There are eval/a/accuracy"),
        (["trainer.best=eval/a/pass@2"], r"'eval/a/pass@2', .* pass@k needs trainer\.eval_samples of at least k"),
    ],
)
def test_the_config_of_a_mix_is_checked_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        check("data.mix={a: {data: {name: arithmetic}}}", *options)


@pytest.mark.parametrize(
    ("data", "function", "error", "message"),
    [
        (
            {"path": "none.jsonl"},
            "graded",
            ConfigError,
            r"^data\.mix\.grades\.data\.path=none\.jsonl: there is no such",
        ),
        (
            {"prompt_key": "tusk"},
            "graded",
            DataError,
            r"^data\.mix\.grades: .* Set data\.mix\.grades\.data\.prompt_key",
        ),
        ({}, "arithmetic", DataError, r"^data\.mix\.grades: .*reward 'arithmetic' needs a reference answer"),
        ({"prompt_len": 2}, "graded", DataError, r"^data\.mix\.grades: .* than data\.mix\.grades\.data\.prompt_len=2 "),
        ({}, "missing", ConfigError, r"^data\.mix\.grades: .*missing"),
    ],
)
def test_the_data_of_a_source_is_checked_before_the_run(files, tmp_path, data, function, error, message):
    chosen = {"functions": {"arithmetic": 1.0}} if function == "arithmetic" else reward(files, function)
    both = {"sums": source(files, "sums"), "grades": source(files, "grades", data=data, reward=chosen)}
    with pytest.raises(error, match=message):
        run(tmp_path / "run", f"data.mix={as_option(both)}")
    assert not (tmp_path / "run").exists()


def test_a_source_without_a_column_that_its_reward_reads_is_refused(files, tmp_path):
    both = {"sums": source(files, "sums", reward=reward(files, "graded")), "grades": source(files, "grades")}
    with pytest.raises(
        DataError, match=r"^data\.mix\.sums: .*reward 'rewards\.graded' needs the column 'grade', which"
    ):
        run(tmp_path / "run", f"data.mix={as_option(both)}")
