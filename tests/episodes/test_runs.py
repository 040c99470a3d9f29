"""Runs with an environment, from the config to the checkpoint."""

import json
from pathlib import Path

import pytest

from rlcore.assets import TINY
from rlcore.config import compose
from rlcore.episodes.from_config import episode_setup
from rlcore.episodes.tool_calls import ToolCall
from rlcore.errors import ConfigError, DataError, EpisodesError
from rlcore.plugins import PluginManager
from rlcore.training.evaluate import evaluate
from rlcore.training.preflight import preflight
from rlcore.training.trainer import train

WORLDS = Path(__file__).with_name("worlds.py")
SMALL = [
    "experiment=quickstart",
    "tracker=none",
    "data.batch_size=4",
    "algo.group_size=4",
    "rollout.response_len=60",
    "trainer.total_steps=4",
    "trainer.eval_every=2",
    "data.max_rows=128",
    "data.eval_size=8",
]
HERE = [*SMALL, "cluster=in_process"]


def run(folder: Path, *overrides: str, base=HERE, plugins: PluginManager | None = None) -> list[dict]:
    """Train and return the metrics of all steps, without those of the clock, of failures and of rounding."""
    plugins = plugins or PluginManager.load()
    train(compose([*base, f"run.dir={folder}", *overrides], plugins), plugins)
    return numbers(folder)


def numbers(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The sampler's log-probs of a row depend by rounding on the rows beside it, and so on the environment's speed.
    left = ("time/", "timeline/", "throughput/", "episodes/", "rollout/", "eval/failed")
    return [{name: value for name, value in row.items() if not name.startswith(left)} for row in rows]


def samples(folder: Path) -> list[dict]:
    files = sorted((folder / "samples").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """A run of Rounds in this process: its folder and its metrics."""
    folder = tmp_path_factory.mktemp("rounds") / "run"
    return folder, run(folder, "env=file", f"env.path={WORLDS}:Rounds")


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_run_of_single_turns_is_the_run_without_an_environment(tmp_path):
    plain = run(tmp_path / "plain")
    single = run(tmp_path / "single", "env=single_turn")
    assert single == plain
    rounding = [
        [{name: value for name, value in json.loads(line).items() if name.startswith("rollout/")} for line in lines]
        for lines in ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("plain", "single"))
    ]
    assert rounding[0] == rounding[1], "without a method `reset` the requests come in the order of generate"
    texts = [[row["response_text"] for row in samples(tmp_path / name)] for name in ("plain", "single")]
    assert texts[0] == texts[1]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_environment_scores_and_the_samples_show_the_conversation(rounds):
    folder, metrics = rounds
    assert [row["reward/mean"] for row in metrics if "reward/mean" in row] == [3.0] * 4
    (first, *_) = samples(folder)
    assert (first["scores"], first["turns"], first["stop_reason"]) == (3.0, 3, "done")
    assert [message["role"] for message in first["episode_messages"]] == ["assistant", "user"] * 2 + ["assistant"]
    assert first["episode"] == f"{first['uid']}/{first['sample_index']}"


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_another_reward_may_score_episodes(tmp_path):
    overrides = ["env=file", f"env.path={WORLDS}:Rounds", "reward.functions={environment: 1.0, arithmetic: 0.0}"]
    (row, *_) = run(tmp_path / "run", *overrides, "trainer.total_steps=1", "trainer.eval_every=0")
    assert row["reward/environment"] == 3.0
    assert 0 <= row["reward/arithmetic"] <= 1


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.ray
def test_two_workers_play_the_same_episodes_as_one(tmp_path, rounds):
    """Each has environment processes of its own."""
    folder, _ = rounds
    overrides = ["env=file", f"env.path={WORLDS}:Rounds", "cluster.workers=2", "trainer.total_steps=1"]
    run(tmp_path / "run", *overrides, base=SMALL)

    def played(folder):
        steps = samples(folder)[:8]
        return [(row["episode"], [message["content"] for message in row["episode_messages"]]) for row in steps]

    assert played(tmp_path / "run") == played(folder)


class Breaking(PluginManager):
    """Breaks the environment after step 2."""

    mark: Path

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 2:
            self.mark.touch()


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_too_many_failures_stop_the_run_and_it_goes_on_when_they_are_mended(tmp_path, rounds):
    """The same command continues from the state before the failed step, and ends equal to an undisturbed run."""
    file, mark, folder = tmp_path / "world.py", tmp_path / "down", tmp_path / "run"
    file.write_text(
        WORLDS.read_text()
        + f"""
class Breaks(Rounds):
    def step(self, messages):
        if os.path.exists({str(mark)!r}):
            raise ConnectionError("the simulator is down")
        return super().step(messages)
"""
    )
    plugins = Breaking.load()
    plugins.mark = mark
    overrides = ["env=file", f"env.path={file}:Breaks", "env.retries=0"]
    with pytest.raises(EpisodesError, match=r"16 of 16 episodes failed, more than env\.max_failures=0\.25") as raised:
        run(folder, *overrides, plugins=plugins)
    assert "ConnectionError: the simulator is down" in str(raised.value)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000002"]
    mark.unlink()
    assert run(folder, *overrides) == rounds[1]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_few_failures_leave_their_groups_smaller(tmp_path, caplog):
    """Prompts that begin with an even digit fail in all their samples."""
    overrides = ["env=file", f"env.path={WORLDS}:Half", "env.max_failures=1.0", "env.retries=0", "trainer.eval_every=0"]
    folder = tmp_path / "run"
    run(folder, *overrides)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < sum(row["episodes/failed"] for row in rows) < 64
    assert {row["reward/mean"] for row in rows} <= {1.0}, "a failed episode is no reward of zero"
    for row in samples(folder):
        assert int(row["prompt_text"][0]) % 2 == 1
    assert "episodes failed and are left out; the first, " in caplog.text


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_an_evaluation_plays_episodes_too(rounds, capsys):
    folder, metrics = rounds
    plugins = PluginManager.load()
    config = compose([], plugins, base=__import__("yaml").safe_load((folder / "config.yaml").read_text()))
    found = evaluate(folder, config, plugins)
    assert found["eval/score"] == 3.0
    assert metrics[-1]["eval/score"] == 3.0


def test_rows_whose_arguments_no_episode_can_have_are_found_before_anything_starts(tmp_path):
    rows = [{"prompt": f"{n}+1=", "chat_template_kwargs": {"enable_thinking": True}} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        "model.chat_template_kwargs={enable_thinking: false}",
        f"model.chat_template={WORLDS.parent / 'templates' / 'thinking.jinja'}",
    ]
    data = ["data=file", f"data.path={tmp_path / 'rows.jsonl'}", "env=file", f"env.path={WORLDS}:Rounds"]
    plugins = PluginManager.load()
    config = compose([*HERE, *given, *data, f"run.dir={tmp_path / 'run'}"], plugins)
    with pytest.raises(
        DataError, match=r"split 'train', row \d+: with chat_template_kwargs={'enable_thinking': True}: "
    ):
        train(config, plugins)
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        DataError, match=r"^with chat_template_kwargs={'enable_thinking': True}: the chat template is not"
    ):
        evaluate(TINY, config, plugins)


def test_a_run_reads_calls_in_the_form_of_its_chat_template():
    template = WORLDS.parent / "call_templates" / "glm47.jinja"
    plugins = PluginManager.load()
    setup = episode_setup(compose([*HERE, "env=calculator", f"model.chat_template={template}"], plugins), plugins)
    assert setup is not None
    written = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert setup.tool_format.parse(written).calls == [ToolCall("add", {"a": 1}, "call00000")]
    prose = template.parents[1] / "templates" / "calls_in_prose.jinja"
    config = compose([*HERE, "env=calculator", f"model.chat_template={prose}"], plugins)
    with pytest.raises(
        ConfigError, match="writes a tool call as '<call> VALUE to NAME', a form that cannot be read back"
    ):
        train(config, plugins)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env=file"], r"env=file needs env\.path=FILE\.py:NAME"),
        (["env=file", "env.path=nowhere.py:World"], r"there is no file .*nowhere\.py"),
        (["env=calculater"], r"env=calculater is unknown\. Did you mean 'calculator'\?"),
        (["env=calculator", "env.turn_len=500"], r"env\.turn_len=500 is more than rollout\.response_len=60"),
        (["env=calculator", "env.tool_format=hermez"], r"env\.tool_format = 'hermez' is not installed"),
        (["env=calculator", "env.path=x.py:Y"], r"env\.path=x\.py:Y is read by env=file only"),
        (["env.timeout=5"], r"env\.timeout=5\.0 without an environment"),
    ],
)
def test_faults_are_found_before_anything_starts(overrides, message):
    plugins = PluginManager.load()
    with pytest.raises(ConfigError, match=message):
        preflight(compose([*HERE, *overrides], plugins), plugins)
