"""`python install.py VENV ARGUMENT...`: make a venv and run `uv pip install ARGUMENT...` in it, with pip's settings.

uv is the one on PATH, or pip installs it into the venv first. uv does not read pip's configuration, so pip's settings
(`pip config list`: configuration files and PIP_* variables) become uv's options. The Makefile calls this for each venv.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

OLDEST_PYTHON = (3, 11)
OLDEST_UV = (0, 7)
"""The first uv that has all options used here."""
SECTIONS = ("global", "install", ":env:")
"""The sections that `pip install` reads; a later one replaces the values of an earlier one."""

LISTS = {
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "build-constraint": "--build-constraints",
    "trusted-host": "--allow-insecure-host",
}
"""pip's settings of several values, and uv's option for each value."""
VALUES = {"index-url": "--default-index", "no-binary": "--no-binary", "only-binary": "--only-binary"}
"""pip's settings of one value, and uv's options."""
FLAGS = {"no-index": ["--no-index"], "pre": ["--prerelease", "allow"]}
"""pip's settings that are on or off, and uv's options."""
VARIABLES = {
    "cert": ["SSL_CERT_FILE"],
    "client-cert": ["SSL_CLIENT_CERT"],
    "proxy": ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"],
    "timeout": ["UV_HTTP_TIMEOUT"],
    "default-timeout": ["UV_HTTP_TIMEOUT"],
    "retries": ["UV_HTTP_RETRIES"],
}
"""pip's settings that uv takes from environment variables."""
WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "compile",
    "disable-pip-version-check",
    "no-color",
    "no-compile",
    "no-input",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}
"""pip's settings that do not change the installed packages."""
ON = {"1", "true", "t", "yes", "y", "on"}
FILES = ("--constraint", "--requirement")
"""The options of `uv pip install` whose files may name a build of torch."""


def read_settings(listing: str) -> dict[str, str]:
    """Return pip's settings for `pip install` from the text that `pip config list` prints.

    Lines that are not settings are skipped: pip may print a warning among them.
    """
    sections: dict[str, dict[str, str]] = {name: {} for name in SECTIONS}
    for line in listing.splitlines():
        match = re.fullmatch(r"(:env:|[\w-]+)\.([\w-]+)=(['\"].*['\"])", line)
        if match and match[1] in sections:
            sections[match[1]][match[2].lower().replace("_", "-")] = ast.literal_eval(match[3])
    merged: dict[str, str] = {}
    for name in SECTIONS:
        merged.update(sections[name])
    return merged


def uv_options(settings: Mapping[str, str]) -> list[str]:
    """Return pip's settings as options of `uv pip install`."""
    options: list[str] = []
    for key, option in VALUES.items():
        if settings.get(key):
            options += [option, settings[key]]
    for key, option in LISTS.items():
        for value in settings.get(key, "").split():
            options += [option, value]
    for key, words in FLAGS.items():
        if settings.get(key, "").lower() in ON:
            options += words
    if settings.get("extra-index-url"):
        # As pip: the newest version of all indexes. uv alone takes the first index that has the package.
        options += ["--index-strategy", "unsafe-best-match"]
    return options


def uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that carry the rest of pip's settings to uv."""
    return {name: settings[key] for key, names in VARIABLES.items() if settings.get(key) for name in names}


def left_out(settings: Mapping[str, str]) -> list[str]:
    """Return the settings that may change the installed packages and that uv does not get."""
    known = {*LISTS, *VALUES, *FLAGS, *VARIABLES, *WITHOUT_EFFECT}
    return sorted(f"{key}={value!r}" for key, value in settings.items() if key not in known)


# Torch's build

UV_DECIDES = ("UV_TORCH_BACKEND", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_NO_INDEX")
"""uv's own variables that determine where torch comes from."""
TORCH = r"(?im)^\s*torch\s*([\[=<>!~@;]|$)"
BUILD_OF_TORCH = r"(?im)^\s*torch\s*(==[^#;\n]*\+|@)"


def decides_torch(settings: Mapping[str, str], constraints: Iterable[str]) -> bool:
    """Whether pip's settings or constraint files determine torch's build.

    pip's settings do where they replace or exclude the public index, name torch in a constraint, or add a place that
    has torch. A file of the project does where it names a build (`torch==2.13.0+cpu`, `torch @ URL`); a version alone
    leaves the build open.
    """
    if settings.get("index-url") or settings.get("no-index", "").lower() in ON:
        return True
    places = f"{settings.get('extra-index-url', '')} {settings.get('find-links', '')}".split()
    return (
        any(_has_torch(place) for place in places)
        or any(re.search(TORCH, _text(file)) for file in settings.get("constraint", "").split())
        or any(re.search(BUILD_OF_TORCH, _text(file)) for file in constraints)
    )


def _has_torch(place: str) -> bool:
    """Whether an index or a find-links folder has torch; one on a server does if its address says so."""
    path = _path(place)
    if path is None:
        return "torch" in place
    return (path / "torch").is_dir() or any(path.glob("torch-*.whl"))


def _text(place: str) -> str:
    """Return the text of a constraint file. A file on a server is read only by uv, and is taken to name torch."""
    path = _path(place)
    return "torch" if path is None else path.read_text()


def _path(place: str) -> Path | None:
    """Return the local path of a path or a file: URL, and None for another URL."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(place)


FROM_INDEX = """\
install.py: torch's builds come from download.pytorch.org. If this machine cannot reach it, name the package index in
pip's settings (`pip config set global.index-url https://pypi.org/simple`): torch then comes from there too."""


# The command


def command(
    uv: str, python: Path, arguments: Sequence[str], settings: Mapping[str, str], torch: str = "auto"
) -> list[str]:
    """Return the whole command `uv pip install ...`.

    Where nothing else determines torch's build, `torch` is the value of uv's --torch-backend: `auto` is the build for
    the GPU that uv finds, or the CPU's without one.
    """
    files = [value for option, value in itertools.pairwise(arguments) if option in FILES]
    decided = decides_torch(settings, files) or any(os.environ.get(name) for name in UV_DECIDES)
    backend = [] if decided else ["--torch-backend", torch]
    return [uv, "pip", "install", "--python", str(python), *uv_options(settings), *backend, *arguments]


def find_uv(python: Path) -> str:
    """Return the path of uv: the one on PATH if it is new enough, else the venv's, installed by its pip."""
    on_path = shutil.which("uv")
    if on_path is not None:
        shown = subprocess.run([on_path, "--version"], capture_output=True, text=True).stdout
        version = tuple(int(part) for part in re.findall(r"\d+", shown)[:2])
        if version >= OLDEST_UV:
            return on_path
    own = python.with_name("uv")
    if not own.exists():
        pinned = Path(__file__).with_name("constraints.txt")
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pinned), "uv"])
    return str(own)


def run(words: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """Run a command; where it fails, end with its status and say how it was called."""
    status = subprocess.run(words, env={**os.environ, **(variables or {})}).returncode
    if status:
        shown = re.sub(r"://[^/@\s]+@", "://***@", shlex.join(words))  # an index's address may hold a password
        print(f"install.py: exit status {status}: {shown}", file=sys.stderr)
        if "--torch-backend" in words:
            print(FROM_INDEX, file=sys.stderr)
        raise SystemExit(status)


def main(arguments: Sequence[str]) -> None:
    """Make the venv if there is none, and install into it."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        raise SystemExit(
            f"rlcore needs Python 3.11 or newer; this is {found} ({sys.executable}): make PYTHON=python3.12"
        )
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit("usage: python install.py VENV [--torch cpu] ARGUMENT...")
    venv, *rest = arguments
    torch = "auto"
    if rest[:1] == ["--torch"]:
        torch, *rest = rest[1:]
    python = Path(venv) / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", venv])
    listing = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = read_settings(listing.stdout)
    for setting in left_out(settings):
        print(f"install.py: pip's setting {setting} is not handed to uv", file=sys.stderr)
    run(command(find_uv(python), python, rest, settings, torch), uv_variables(settings))


if __name__ == "__main__":
    main(sys.argv[1:])
