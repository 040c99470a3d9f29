"""A new kind of plugin is added to a copy of rlcore for real, and touches two of its files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlcore

ROOT = Path(rlcore.__file__).parent
SPEC = '''
@dataclass(frozen=True)
class WorldSpec(Generic[C]):
    """A world."""

    name: str
    create: Callable[[C], Any]
    config_class: type[C] | None = None


@dataclass(frozen=True)
class WorldConfig:
    """The world that episodes are in."""

    name: str = field(default="", metadata={"doc": "world: one of the installed ones"})
    turns: int = field(default=4, metadata={"doc": "most turns", "min": 1})


'''
ROW = """    PluginKind(
        WorldSpec,
        "rlcore_worlds",
        "world",
        group="world",
        keys=WorldConfig,
        chosen=lambda config, _: [("world.name", w.name)] if (w := config.section(WorldConfig)).name else [],
    ),
"""
HOOK = '''
@_spec
def rlcore_worlds() -> WorldSpec | Sequence[WorldSpec]:
    """Give worlds, `world=NAME`.

    When: once, when plugins are loaded.
    Returns: one WorldSpec or a list of them.
    Errors: a name that another plugin has given stops the command.
    """
    raise NotImplementedError


'''
PLUGIN = '''
from dataclasses import dataclass
from rlcore import WorldSpec, hookimpl, option
RLCORE_API = 1

@dataclass(frozen=True)
class Maze:
    """A maze."""
    size: int = option(3, "width", min=2)

@hookimpl
def rlcore_worlds():
    return WorldSpec("maze", dict, Maze)
'''
SCRIPT = """
import sys
import rlcore
from rlcore.cli import main
print(rlcore.__file__)
own = [word for name in sys.argv[3:] for word in ("-p", f"no:{name}")]
first, second = ["-p", sys.argv[1]], ["-p", sys.argv[2]]
for argv in (
    [*first, *own, "plugins"],
    [*first, "config", "algo=grpo", "world=maze", "world.maze.size=5", "world.turns=2"],
    [*first, "config", "algo=grpo", "world.name=mace"],
    [*first, "config", "algo=grpo", "world=mace"],
    [*first, "config", "algo=grpo", "world=maze", "world.maze.size=1"],
    [*first, "config", "algo=grpo", "world.turn=1"],
    [*first, "config", "--keys"],
    [*first, *second, *own, "plugins"],
):
    status = main(argv)
    print(f"=> {status}", flush=True)
    print(f"=> {status}", file=sys.stderr, flush=True)
"""


def put(path: Path, before: str, text: str) -> None:
    source = path.read_text()
    assert source.count(before) == 1
    path.write_text(source.replace(before, text + before))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Add the kind to a copy of rlcore, and return what its commands print, each on stdout and on stderr."""
    from rlcore.plugins import installed

    folder = tmp_path_factory.mktemp("kind")
    shutil.copytree(ROOT, folder / "rlcore", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT.parent / "configs", folder / "rlcore" / "configs", ignore=shutil.ignore_patterns("__pycache__")
    )
    specs, hooks = (folder / "rlcore" / "plugins" / f"{name}.py" for name in ("specs", "hookspecs"))
    put(specs, "class Chooser(Protocol):", SPEC)
    put(specs, '    PluginKind(ConfigSpec, "rlcore_configs"', ROW)
    put(specs, '    "WorkerSpec",\n]', '    "WorldSpec",\n')
    put(hooks, "@_spec\ndef rlcore_algorithm()", HOOK)
    put(hooks, "    WorkerSpec,\n)", "    WorldSpec,\n")
    for stem in ("first", "second"):
        (folder / f"{stem}.py").write_text(PLUGIN)
    (folder / "say.py").write_text(SCRIPT)
    names = [entry.name for entry in installed() if not entry.name.startswith("command.")]
    done = subprocess.run(
        [sys.executable, folder / "say.py", folder / "first.py", folder / "second.py", *names],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder / "rlcore")), done.stdout  # not the one of this checkout
    return [stream.split("=> ") for stream in (done.stdout, done.stderr)]


def test_the_kind_is_loaded_listed_and_has_its_group_keys_and_duplicates_rule(said):
    out, errors = said
    assert [text[0] for text in out[1:]] == ["0", "0", "2", "2", "2", "2", "0", "2"], errors
    assert "first  [local, loaded]" in out[0]
    assert "gives  world maze" in out[0]
    assert "world:\n" not in out[0]
    assert "name: maze\n  turns: 2\n  maze:\n    size: 5\n" in out[1]
    assert "world.name = 'mace' is not installed. Did you mean 'maze'? Installed: maze" in errors[2]
    assert "world=mace is unknown. Did you mean 'maze'? Available: maze" in errors[3]
    assert "world.maze.size = 1 is out of bounds: it must be at least 2" in errors[4]
    assert "unknown key 'world.turn'. Did you mean 'world.turns'? Allowed under 'world': name, turns, maze" in errors[5]
    assert "world.turns = 4  [int]" in out[6]
    assert "world.maze.size = 3  [int]" in out[6]
    assert "rlcore_worlds() gives the name 'maze', which plugin 'first'" in out[7]
