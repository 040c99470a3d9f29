import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.plugins import installed

FILES = Path(__file__).parents[1] / "fixtures" / "plugins"


@pytest.fixture
def plugin_file() -> Callable[[str], str]:
    """Give the path of a fixture plugin by its stem."""
    return lambda stem: str(FILES / f"{stem}.py")


@pytest.fixture(scope="session")
def without_own() -> list[str]:
    """Options that block rlcore's own plugins, which import torch."""
    return [f"no:{entry.name}" for entry in installed()]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that installs a distribution (metadata and modules on sys.path) for one test."""

    def install(name: str, entry_points: dict[str, str], modules: dict[str, str], version: str = "1.2") -> Path:
        folder = tmp_path / f"site-{name}"
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{entry} = {module}" for entry, module in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[rlcore]", *lines, ""]))
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return install
