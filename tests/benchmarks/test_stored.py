"""`make bench-check STORED=1`: which stored results it names, on files and git repositories of the tests' own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import report, stored
from benchmarks.gpu import doctor
from benchmarks.report import Bar, Benchmark, Figure, at_least, at_most

SPEED, MEMORY = at_least("speed", 5.5), at_most("memory", 0.5)
BENCHMARK = Benchmark("tail", measures=("code", "benchmarks/tail.py"), bars=(SPEED, MEMORY), plots=("tail_rows",))
MEASURED = "2026-01-02T12:00:00+00:00"
BEFORE, AFTER, LATER = "2026-01-02T11:00:00+00:00", "2026-01-02T13:00:00+00:00", "2026-01-02T14:00:00+00:00"


class Repository:
    """A git repository with the code that `BENCHMARK` measures and its stored result of `MEASURED`."""

    def __init__(self, root: Path) -> None:
        self.root, self.results = root, root / "benchmarks" / "results"
        self.git("init", "--quiet", "--initial-branch=main")
        self.write("code/decode.py", '"""Decode."""\n\nTOKENS = 1\n')
        self.write("benchmarks/tail.py", "STEPS = 2\n")
        self.commit(BEFORE)
        self.store([SPEED.at(6), MEMORY.at(0.3)])

    def git(self, *words: str, date: str = BEFORE) -> str:
        names = {
            f"GIT_{who}_{what}": "tests@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        env = {**os.environ, **names, **dates, "GIT_CONFIG_GLOBAL": os.devnull}
        done = subprocess.run(["git", *words], cwd=self.root, env=env, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def commit(self, date: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=change", date=date)
        return self.git("rev-parse", "HEAD")[:9]

    def store(self, bars: list[Bar]) -> None:
        self.results.mkdir(parents=True, exist_ok=True)
        lines = [{**vars(bar), "holds": bar.holds} for bar in bars]
        (self.results / "tail.json").write_text(json.dumps({"name": "tail", "date": MEASURED, "bars": lines}))

    def check(self) -> list[str]:
        return stored.check([BENCHMARK], self.results, self.root)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_result_with_the_declared_bars_and_no_later_code_is_not_named(repository: Repository) -> None:
    for name in ("tail.md", "tail_rows.svg", "gpu_before_slots.json"):
        (repository.results / name).touch()
    assert repository.check() == []
    repository.commit(AFTER)
    assert repository.check() == []


def test_bars_that_differ_are_named(repository: Repository) -> None:
    repository.store([at_least("speed", 4).at(4.45), at_least("memory", 0.5).at(0.6), at_most("seconds", 3).at(1)])
    assert repository.check() == [
        "bars differ: tail: 'speed' is ≥ 4 in the stored result and ≥ 5.5 in the program: 4.45 does not hold",
        "bars differ: tail: 'memory' is ≥ 0.5 in the stored result and ≤ 0.5 in the program: 0.6 does not hold",
        "bars differ: tail: 'seconds' is stored; the program has no such bar",
    ]
    repository.store([SPEED.at(6)])
    assert repository.check() == ["bars differ: tail: 'memory' ≤ 0.5 is not in the stored result"]


def test_a_stored_verdict_is_computed_again(repository: Repository) -> None:
    file = repository.results / "tail.json"
    file.write_text(file.read_text().replace('"value": 6', '"value": 5'))
    (line,) = repository.check()
    assert line == "bars differ: tail: 'speed': holds is True in the stored result, but by ≥ 5.5, 5 does not hold"


def test_files_of_no_benchmark_and_missing_results_are_named(repository: Repository) -> None:
    (repository.results / "tail_old.json").touch()
    (repository.results / "tail_rows.svg").touch()
    assert repository.check() == ["bars differ: tail_old.json belongs to no benchmark"]
    (repository.results / "tail_old.json").unlink()
    (repository.results / "tail.json").unlink()
    assert repository.check() == ["bars differ: tail: there is no stored result"]


def test_a_result_older_than_code_or_program_is_named(repository: Repository) -> None:
    repository.commit(MEASURED)
    repository.write("code/decode.py", "TOKENS = 2\n")
    code = repository.commit(AFTER)
    line = f"older than the code: tail: result of {MEASURED}; code/decode.py changed {AFTER} ({code})"
    assert repository.check() == [line]
    repository.write("benchmarks/tail.py", "STEPS = 3\n")
    program = repository.commit(LATER)
    assert repository.check() == [f"{line}, benchmarks/tail.py changed {LATER} ({program})"]


def test_code_committed_between_measuring_and_storing_is_newer(repository: Repository) -> None:
    repository.write("code/decode.py", "TOKENS = 2\n")
    repository.git("add", "code")
    repository.git("commit", "--quiet", "--message=change", date=AFTER)
    assert len(repository.check()) == 1
    repository.commit(LATER)
    (line,) = repository.check()
    assert line.startswith(f"older than the code: tail: result of {MEASURED}; code/decode.py changed {AFTER}")


def test_code_committed_with_its_result_is_not_newer(repository: Repository) -> None:
    repository.write("code/decode.py", "TOKENS = 2\n")
    repository.commit(AFTER)
    assert repository.check() == []


def test_code_merged_after_the_result_was_stored_is_newer_whatever_its_date(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "side", "main")
    repository.write("code/decode.py", "TOKENS = 2\n")
    repository.git("add", "code")
    repository.git("commit", "--quiet", "--message=change")
    side = repository.git("rev-parse", "HEAD")[:9]
    repository.git("switch", "--quiet", "main")
    repository.commit(AFTER)
    assert repository.check() == []
    repository.git("merge", "--quiet", "--no-edit", "side", date=LATER)
    assert repository.check() == [
        f"older than the code: tail: result of {MEASURED}; code/decode.py changed {BEFORE} ({side})"
    ]


def test_prose_is_not_code(repository: Repository) -> None:
    repository.commit(MEASURED)
    repository.write("code/decode.py", '"""Decode tokens."""\n\nTOKENS = 1  # one at a time\n"""Tokens of a step."""\n')
    repository.write("code/README.md", "Decoding.\n")
    repository.commit(AFTER)
    assert repository.check() == []
    repository.write("code/kernel.cu", "// decode\n")
    repository.commit(LATER)
    assert len(repository.check()) == 1


def test_without_git_the_age_is_unknown(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> None:
    repository.commit(AFTER)
    clone = tmp_path_factory.mktemp("clone")
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(clone))
    (line,) = stored.check([BENCHMARK], clone / "benchmarks" / "results", clone)
    assert line.startswith("age unknown: ")
    assert "shallow" in line
    (repository.root / ".git").rename(repository.root / "elsewhere")
    (line,) = repository.check()
    assert line.startswith("age unknown: ")


def test_a_measured_path_that_does_not_exist_is_named(repository: Repository) -> None:
    (repository.root / "code").rename(repository.root / "moved")
    assert "age unknown: tail measures code, which does not exist" in repository.check()


def test_bars_that_are_not_declared_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    figures = [Figure("rlcore", "a step", "s", [1.0])]
    for bar in (Bar("tokens", 6, 5.5, True), Bar("speed", 6, 4, True), Bar("speed", 6, 5.5, False)):
        with pytest.raises(ValueError, match=f"'tail' does not declare .*{bar.name}"):
            BENCHMARK.write(figures, [SPEED.at(6), bar], "")
    assert list(tmp_path.iterdir()) == []
    assert BENCHMARK.write(figures, [SPEED.at(6), MEMORY.at(0.3)], "")
    assert not BENCHMARK.write(figures, [SPEED.at(5), MEMORY.at(0.3)], "")
    found = json.loads((tmp_path / "tail.json").read_text())
    assert stored.differing_bars(BENCHMARK, found) == []
    with pytest.raises(ValueError, match="two bars named 'speed'"):
        Benchmark("twice", measures=(), bars=(SPEED, at_least("speed", 2)))


def test_what_the_benchmarks_declare_fits_this_checkout() -> None:
    from benchmarks.__main__ import BENCHMARKS, PROGRAMS

    declared = [benchmark for benchmark, _ in PROGRAMS]
    assert len(BENCHMARKS) == len(declared)
    for benchmark in declared:
        assert [path for path in benchmark.measures if not (stored.ROOT / path).exists()] == []
        assert any(path.startswith("benchmarks/") for path in benchmark.measures), benchmark.name
    assert stored.unknown_files(declared, stored.ROOT / "benchmarks" / "results") == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="it would run vLLM")
def test_the_doctor_knows_its_parts_on_request(tmp_path: Path) -> None:
    found = doctor.Findings()
    names = [name for name, part in doctor.PARTS.items() if part.on_request]
    assert "vllm_asleep" in names
    env = {**os.environ, "PYTHONPATH": str(doctor.ROOT)}
    done = doctor.run_parts(found, ["vllm_asleep"], "small", tmp_path, env, tmp_path, seconds=60)
    assert list(done) == ["vllm_asleep"]
    assert (found.absent, found.failed) == ({"vllm_asleep": "vllm"}, {})


def test_the_doctor_names_a_given_model_that_is_not_there(tmp_path: Path) -> None:
    found = doctor.Findings()
    env = {**os.environ, "PYTHONPATH": str(doctor.ROOT), "BENCH_MODEL": str(tmp_path / "nowhere")}
    list(doctor.run_parts(found, ["given"], "small", tmp_path, env, tmp_path, seconds=60))
    assert (found.absent, found.failed) == (
        {"given": f"model in the folder '{tmp_path / 'nowhere'}' (--model FOLDER)"},
        {},
    )


def test_the_doctor_makes_a_bar_only_from_measured_figures() -> None:
    assert doctor.bars(doctor.Findings()) == []
    sides = [
        ("rlcore hf 0.5B", "a step", 2.0),
        ("TRL 1.16.0 0.5B", "a step", 14.0),
        ("head", "forward and backward", 60.0),
    ]
    figures = [Figure(side, name, "", [value]) for side, name, value in sides]
    assert [(bar.name, bar.value, bar.holds) for bar in doctor.bars(doctor.Findings(figures))] == [
        ("head: ms", 60.0, False),
        ("times TRL's steps", 7.0, True),
    ]
