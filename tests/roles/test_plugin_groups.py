"""Worker groups of plugins: they start at their first use, once, and an unknown one names its plugin."""

import pytest

from rlcore import Config, PluginError, WorkerSpec
from rlcore.config import ClusterConfig
from rlcore.roles.plugin_groups import PluginGroups
from rlcore.workers import Dispatch, Worker, make_executor, register


class Adder(Worker):
    made = 0

    def __init__(self, by: int) -> None:
        Adder.made += 1
        self.by = by

    @register(Dispatch.ONE_TO_ALL)
    def add(self, number: int) -> int:
        return number + self.by


class Counted:
    def __init__(self, group, config) -> None:
        self.group, self.config, self.calls = group, config, 0

    def add(self, number: int) -> int:
        self.calls += 1
        return self.group.add(number)[0]

    def end_step(self):
        calls, self.calls = self.calls, 0
        return lambda: {"adder/calls": float(calls)}


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.setattr(Adder, "made", 0)
    config = Config("", None, cluster=ClusterConfig(executor="in_process"))
    specs = {
        "plain": WorkerSpec("plain", Adder, (1,), workers=2),
        "counted": WorkerSpec("counted", Adder, (10,), Counted),
    }
    with make_executor(config.cluster) as executor:
        yield PluginGroups(specs, executor, config)


def test_a_group_starts_at_its_first_use_and_once(groups):
    assert (Adder.made, groups.started) == (0, [])
    assert groups.get("plain").add(1) == [2, 2]
    assert groups.get("plain") is groups.get("plain")
    assert (Adder.made, len(groups.started)) == (2, 1)


def test_a_handle_takes_the_place_of_the_group_and_adds_metrics(groups):
    assert groups.get("counted").add(1) == 11
    (metrics,) = groups.end_step()
    assert metrics() == {"adder/calls": 1.0}
    (metrics,) = groups.end_step()
    assert metrics() == {"adder/calls": 0.0}


def test_an_unknown_group_names_the_nearest_and_a_plugin(groups):
    with pytest.raises(PluginError, match=r"no worker group 'plane'. Did you mean 'plain'\? .* rlcore-plugin-plane"):
        groups.get("plane")
