"""install.py: pip's settings reach uv, and torch's build is the right one. The whole file takes about 8 s."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = str(ROOT / "constraints.txt")


@pytest.fixture(scope="module")
def install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    """This machine's own settings of pip and uv."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)


def pip_config(tmp_path: Path, text: str, **variables: str) -> str:
    """What pip itself prints for a configuration file and variables."""
    (tmp_path / "pip.conf").write_text(text)
    environment = {**os.environ, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **variables}
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_settings_of_pip_itself_are_read(install, tmp_path):
    listing = pip_config(
        tmp_path,
        """
[global]
index-url = https://user:it's@mirror.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
find-links = /from/the/file
cert = /etc/ca.pem
[install]
constraint = caps.txt
[download]
no-index = true
""",
        PIP_FIND_LINKS="/wheels /more wheels",
        PIP_DEFAULT_TIMEOUT="180",
    )
    settings = install.read_settings(listing)
    assert {key: settings[key] for key in ("index-url", "find-links", "constraint", "default-timeout")} == {
        "index-url": "https://user:it's@mirror.example/simple",
        "find-links": "/wheels /more wheels",  # a variable replaces the file's value
        "constraint": "caps.txt",
        "default-timeout": "180",
    }
    assert "no-index" not in settings  # only for `pip download`
    assert install.uv_options(settings) == [
        *("--default-index", "https://user:it's@mirror.example/simple"),
        *("--index", "https://one.example/simple", "--index", "https://two.example/simple"),
        *("--find-links", "/wheels", "--find-links", "/more", "--find-links", "wheels"),  # pip splits at spaces too
        *("--constraint", "caps.txt", "--index-strategy", "unsafe-best-match"),
    ]
    assert install.uv_variables(settings) == {"SSL_CERT_FILE": "/etc/ca.pem", "UV_HTTP_TIMEOUT": "180"}


def test_a_setting_that_uv_does_not_get_is_named(install):
    settings = {"require-hashes": "true", "quiet": "1", "pre": "yes", "proxy": "http://proxy:8080"}
    assert install.left_out(settings) == ["require-hashes='true'"]
    assert install.uv_options(settings) == ["--prerelease", "allow"]
    assert install.uv_variables(settings)["ALL_PROXY"] == "http://proxy:8080"


def backend(install, settings: dict[str, str], *arguments: str, torch: str = "auto") -> str | None:
    """The value of --torch-backend in the command, if it has one."""
    words = install.command("uv", Path("v/bin/python"), arguments, settings, torch)
    assert words[:5] == ["uv", "pip", "install", "--python", "v/bin/python"]
    assert words[len(words) - len(arguments) :] == list(arguments)
    return words[words.index("--torch-backend") + 1] if "--torch-backend" in words else None


def test_uv_chooses_the_build_of_torch_where_nobody_else_does(install, tmp_path):
    assert backend(install, {}, "--constraint", CONSTRAINTS, "--editable", ".") == "auto"
    assert backend(install, {}, "torch==2.13.0", torch="cpu") == "cpu"
    (tmp_path / "caps.txt").write_text("torchvision<1\ntorchdata\nnumpy  # not torch==1+cpu\n")
    others = {"constraint": str(tmp_path / "caps.txt"), "extra-index-url": "https://mirror.example/simple"}
    assert backend(install, {**others, "find-links": str(tmp_path), "no-index": "false"}) == "auto"


@pytest.mark.parametrize(
    "settings",
    [
        {"index-url": "https://mirror.example/simple"},
        {"no-index": "true"},
        {"extra-index-url": "https://mirror.example/simple https://download.pytorch.org/whl/cu128"},
        {"extra-index-url": "file:///{tmp}/simple"},
        {"find-links": "{tmp}/wheels"},
        {"constraint": "{tmp}/caps.txt"},
        {"constraint": "https://mirror.example/caps.txt"},
    ],
    ids=str,
)
def test_settings_of_pip_that_determine_torch_win(install, tmp_path, settings):
    (tmp_path / "simple" / "torch").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "torch-2.13.0-cp311-cp311-linux_x86_64.whl").touch()
    (tmp_path / "caps.txt").write_text("numpy\ntorch<=2.14.1\n")
    assert backend(install, {key: value.format(tmp=tmp_path) for key, value in settings.items()}) is None


@pytest.mark.parametrize("line", ["torch==2.13.0+cpu", "torch @ https://example.org/torch.whl", "torch ==2.13.0+cu130"])
def test_a_build_in_the_constraints_wins(install, tmp_path, line):
    (tmp_path / "constraints.txt").write_text(f"numpy==2.4.6\n{line}\n")
    assert backend(install, {}, "--constraint", str(tmp_path / "constraints.txt"), "torch") is None


def test_a_choice_made_for_uv_wins(install, monkeypatch):
    monkeypatch.setenv("UV_TORCH_BACKEND", "cu128")
    assert backend(install, {}, "torch") is None


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A folder with wheels and a constraint, and the variables of a machine whose pip is set up to use only these."""
    folder = tmp_path_factory.mktemp("offline")
    for name, version in (("small_package", "1.0"), ("small_package", "2.0"), ("uv", "0.13.9")):
        wheel(folder / "wheels", name, version)
    (folder / "caps.txt").write_text("small_package<2\n")
    (folder / "pip.conf").write_text(f"[global]\nfind-links = {folder}/wheels\n")
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # uv is this venv's
        "PIP_CONFIG_FILE": str(folder / "pip.conf"),
        "PIP_NO_INDEX": "1",
        "PIP_CONSTRAINT": str(folder / "caps.txt"),
        "UV_CACHE_DIR": str(folder / "cache"),
    }
    return folder, variables


def run_install(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "install.py"), *arguments]
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return subprocess.run(command, env={**others, **variables}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def made(offline):
    """The Python of a venv that install.py has made."""
    folder, variables = offline
    done = run_install(variables, str(folder / "venv"), "small_package")
    assert done.returncode == 0, done.stderr
    return folder / "venv" / "bin" / "python"


def test_a_venv_is_made_and_uv_installs_with_the_settings_of_pip(made):
    show = [made, "-c", "import small_package; print(small_package.VERSION)"]
    assert subprocess.run(show, capture_output=True, text=True).stdout == "1.0\n"


def test_a_failure_ends_with_the_command(made, offline):
    refused = run_install(offline[1], str(made.parents[1]), "absent_package")
    assert refused.returncode != 0
    assert "absent-package" in refused.stderr
    assert "install.py: exit status" in refused.stderr


def test_pip_installs_uv_into_the_venv_where_path_has_none(install, made, offline, monkeypatch):
    for name, value in {**offline[1], "PATH": "/usr/bin:/bin"}.items():
        monkeypatch.setenv(name, value)
    assert install.find_uv(made) == str(made.with_name("uv"))
    subprocess.run([made, "-c", "import uv"], check=True)  # the small wheel, which has no program


def test_a_failure_shows_no_password_and_says_where_torch_came_from(install, capsys):
    words = ["false", "--index", "https://user:secret@mirror.example/simple", "--torch-backend", "auto"]
    with pytest.raises(SystemExit) as raised:
        install.run(words)
    assert raised.value.code == 1
    printed = capsys.readouterr().err
    assert "secret" not in printed
    assert "https://***@mirror.example/simple" in printed
    assert "pip config set global.index-url" in printed


@pytest.mark.parametrize(("shown", "taken"), [("uv 0.13.9 (x86_64)", True), ("uv 0.6.17", False), ("uv 1.0", True)])
def test_an_old_uv_on_path_is_not_taken(install, tmp_path, monkeypatch, shown, taken):
    for folder, text in (("path", shown), ("venv", "uv of the venv")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "uv").write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=os.pathsep)
    assert install.find_uv(tmp_path / "venv" / "python") == str(tmp_path / ("path" if taken else "venv") / "uv")
