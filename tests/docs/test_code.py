"""Every code block of README.md, CONTRIBUTING.md and docs/ runs, page by page, in the order in which it stands.

A fence's info string says what its block is: `python` and `sh` run, `LANGUAGE file=NAME` is written to a file,
`python run=grpo-step` runs inside a real run, `sh unfinished=RUN` finds RUN as a killed one, `text` is only read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlcore.assets import TINY
from rlcore.cli import main

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SMALL = {
    "cluster": "in_process",
    "trainer.total_steps": "1",
    "trainer.eval_every": "0",
    "data.max_rows": "128",
    "data.eval_size": "2",
    "data.batch_size": "2",
    "rollout.response_len": "4",
}
"""What is added to a command that trains or evaluates, where the command does not say otherwise."""

NOT_RUN = {
    r"make (train|real|test|check|quick ROOM=\w+)": "longer than all of this; the Makefile is checked below",
    r"pip install -e \. -e plugins/rlcore-plugin-plan .* -c constraints\.txt": "installs what these tests run on",
    r"pip install -e \"\.\[vllm\]\"|pip install --no-deps -r requirements-vllm\.txt -e \.": "make test-vllm does it",
    r"rlcore train (experiment=quickstart|algo=grpo) rollout=vllm.*": "needs vLLM; tests/engines/vllm runs it",
    r"rlcore plan --calibrate .*": "measures for minutes; make bench B=plan does it",
    r"python online_dpo_workers\.py": "tests/workers/test_verl_tutorial.py runs it, and compares its numbers",
    r"python -m pdb .*": "waits at a prompt",
    r"grep RemotePdb .*": "looks for a line that only a stopped Ray worker writes",
    r"nc localhost \d+": "connects to that worker",
    r"ps -eo .*": "looks at a run under way",
    r"py-spy dump .*": "looks at a process under way; py-spy is no dependency",
    r"p?kill -USR2 .*": "signals a run under way; tests/suite/test_stacks.py does it",
}
"""Commands that are shown and not run, and why."""


def blocks(page: Path) -> list[tuple[str, dict[str, str], str]]:
    """Return each block's language, options and text."""
    found = FENCE.findall(page.read_text())
    return [(language, dict(word.partition("=")[::2] for word in info.split()), text) for language, info, text in found]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    reader = Reader(tmp_path, monkeypatch)
    with reader.background:
        follow(reader, page, tmp_path)


def follow(reader: Reader, page: Path, tmp_path: Path) -> None:
    """Run a page's blocks in their order."""
    for language, options, text in blocks(page):
        if "file" in options:
            reader.write(options["file"], text)
        elif language == "sh":
            if "unfinished" in options:
                (tmp_path / options["unfinished"] / "summary.json").unlink()
            for line in text.replace("\\\n", " ").splitlines():
                reader.run(line)
        elif language == "python":
            if "run" not in options:  # else below
                exec(compile(text, f"{page.name}", "exec"), reader.names)
        else:
            assert language == "text", f"{page.name}: a block of {language!r} neither runs nor is a file"


class Reader:
    """Someone who follows a page in an empty folder, with a model and GSM8K at hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.background = ExitStack()
        self.names: dict[str, object] = {"__name__": "__docs__"}
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        (folder / "models").mkdir()
        (folder / "models" / "my-model").symlink_to(TINY)
        (folder / "Qwen").mkdir()
        (folder / "Qwen" / "Qwen3-0.6B").symlink_to(TINY)  # a folder wins over a name on the hub
        (folder / "data" / "gsm8k").mkdir(parents=True)
        (folder / "openai").mkdir()
        (folder / "openai" / "gsm8k").symlink_to(folder / "data" / "gsm8k")
        for name, count in (("train", 4), ("test", 2)):
            rows = [{"question": f"{name} {i} + 1?", "answer": f"It is\n#### {i + 1}"} for i in range(count)]
            (folder / "data" / "gsm8k" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        # A test before this one may have imported another module of the name, as those of tests/fixtures/engines.
        self.monkeypatch.delitem(sys.modules, path.stem, raising=False)

    def run(self, line: str) -> None:
        if any(re.fullmatch(pattern, line) for pattern in NOT_RUN):
            return
        words = shlex.split(line)
        while "=" in words[0]:
            self.monkeypatch.setenv(*words.pop(0).split("=", 1))
        program, *rest = words
        if rest[-1:] == ["&"]:
            self._start([f"{program}.cli", *rest[:-1]])
        elif program == "rlcore" and rest[:2] == ["plugins", "test"]:
            self._run_apart(["rlcore.cli", *rest])  # it kills a run and starts a Ray, which must find the plugin
        elif program == "rlcore":
            assert main(small(rest)) == 0, line
            self._forget_modules()
        elif program == "pytest":
            self._run_apart([program, *rest])
        else:
            assert [program, *rest[:2]] == ["pip", "install", "-e"], f"nobody knows how to run {line!r}"
            project = rest[2].partition("[")[0]  # the extras are what these tests run on
            if project.startswith("plugins/"):  # in a checkout, where building must leave no traces
                shutil.copytree(ROOT / project, project, ignore=shutil.ignore_patterns("*.egg-info", "build"))
            self._install(self.folder / project)

    def _install(self, project: Path) -> None:
        """Install a distribution as `pip install -e` does, for this folder alone: its metadata, and its own modules."""
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", "site"]
        subprocess.run([*pip, str(project)], check=True, env={**os.environ, "PIP_NO_INDEX": "1"})
        for path in (self.folder / "site", project):
            self.monkeypatch.syspath_prepend(path)
        self.monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (project, self.folder / "site"))))

    def _start(self, words: list[str]) -> None:
        """Start a server, which says on its first line that it listens; it ends with the page."""
        server = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
        self.background.callback(server.communicate, timeout=60)
        self.background.callback(server.terminate)
        assert server.stdout is not None
        assert "http://" in server.stdout.readline()

    def _run_apart(self, words: list[str]) -> None:
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def _forget_modules(self) -> None:
        """Each command is a process of its own to a reader: what one has loaded is not there in the next."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]


def small(argv: list[str]) -> list[str]:
    """Add to a command that trains or evaluates what makes it short."""
    if argv[0] not in ("train", "eval") or {"--help", "--cfg"} & set(argv):
        return argv
    given = {word.partition("=")[0] for word in argv}
    if "experiment=mixed" in argv:
        given.add("data.max_rows")  # refused beside data.mix
    return [*argv, *(f"{key}={value}" for key, value in SMALL.items() if key not in given)]


def test_every_exemption_is_needed_and_the_makefile_has_what_the_pages_name():
    commands = [text for page in PAGES for language, _, text in blocks(page) if language == "sh"]
    lines = "".join(commands).splitlines()
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, line) for line in lines), f"no page shows {pattern}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:`|^)make ([\w-]+)", "".join(page.read_text() for page in PAGES), re.MULTILINE)
    assert {"train", "test", "check", "quick", "test-slow"} <= set(named) <= set(targets)
