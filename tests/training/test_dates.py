"""A chat template that writes today's date: the run keeps its day, however long it lasts. About 5 s."""

import datetime

import pytest
import yaml

from rlcore.assets import TINY
from rlcore.config import ModelConfig, compose
from rlcore.data.chat import load_tokenizer
from rlcore.errors import ConfigError
from rlcore.plugins import PluginManager


@pytest.fixture
def template(tmp_path):
    file = tmp_path / "dated.jinja"
    # The digits are tokens of the tiny model; letters are too.
    file.write_text("{{ strftime_now('%d%m%Y') }}" + (TINY / "chat_template.jinja").read_text())
    return file


def test_a_run_that_is_resumed_another_day_has_its_own_date(train_small, metrics_of, template, tmp_path, monkeypatch):
    class Stopping(PluginManager):
        def step_end(self, run, step, metrics):
            super().step_end(run, step, metrics)
            if step == 2:
                raise RuntimeError("stop here")

    options = [f"model.chat_template={template}", "trainer.total_steps=3", "trainer.checkpoint_every=1"]
    train_small(tmp_path / "straight", *options)
    with pytest.raises(RuntimeError, match="stop here"):
        train_small(tmp_path / "run", *options, plugins=Stopping.load())
    today = datetime.date.today()
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["date"] == today.isoformat()

    a_day = datetime.timedelta(days=1)

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + a_day

    class Day(datetime.date):
        @classmethod
        def today(cls):
            return today + a_day

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    monkeypatch.setattr(datetime, "date", Day)
    assert compose(["algo=grpo"], PluginManager.load()).model.date != today.isoformat()
    train_small(tmp_path / "run", *options)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "straight")


def test_templates_read_the_date_of_the_config(tmp_path):
    file = tmp_path / "dated.jinja"
    file.write_text("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(ModelConfig(chat_template=str(file), date="2024-02-29"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "29 Feb 2024x"
    tokenizer.save_pretrained(tmp_path / "saved")  # the date is the run's, not the tokenizer's
    assert "2024" not in (tmp_path / "saved" / "tokenizer_config.json").read_text()


def test_a_template_with_chance_in_it_and_a_wrong_date_are_refused(train_small, tmp_path):
    file = tmp_path / "chance.jinja"
    file.write_text("{{ ['a', 'b'] | random }}{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=r"chance\.jinja: the chat template uses '| random', which differs"):
        train_small(tmp_path / "run", f"model.chat_template={file}")
    for wrong in ("2026-02-30", "monday"):
        with pytest.raises(ConfigError, match=rf"model\.date={wrong} is no date"):
            train_small(tmp_path / "run", f"model.date={wrong}")


def test_words_that_only_speak_of_chance_and_a_template_without_a_date_are_taken(tmp_path):
    file = tmp_path / "prose.jinja"
    file.write_text("Answer yes | no | random. {{ messages[0].content }}")
    tokenizer = load_tokenizer(ModelConfig(chat_template=str(file), date="2024-02-29"))
    assert "apply_chat_template" not in vars(tokenizer)  # a folder's own tokenizer may not take the date
