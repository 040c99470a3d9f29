"""A run folder that was left half made does not stand in the way."""

import pytest

from rlcore.config import compose
from rlcore.plugins import PluginManager
from rlcore.training.folder import open_folder


@pytest.fixture(scope="module")
def plugins():
    return PluginManager.load()


@pytest.mark.parametrize("left", [[".lock"], [".lock", "versions.json"], [".lock", "config.yaml.writing"]])
def test_what_a_stopped_start_left_behind_is_taken_over(plugins, tmp_path, left):
    for name in left:
        (tmp_path / name).touch()
    open_folder(tmp_path, compose(["algo=grpo"], plugins), plugins).close()
    assert (tmp_path / "config.yaml").read_text()


def test_a_start_that_failed_may_be_repeated_with_another_config(plugins, tmp_path):
    open_folder(tmp_path, compose(["algo=grpo"], plugins), plugins).close()
    folder = open_folder(tmp_path, compose(["algo=grpo", "trainer.seed=5"], plugins), plugins)
    folder.close()
    assert folder.resume_from is None
    assert "seed: 5" in (tmp_path / "config.yaml").read_text()
