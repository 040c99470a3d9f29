"""docs/python.ipynb runs in a kernel: its event loop is running, and its functions and classes are of cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.ipynb"


def texts(cell: Any) -> list[str]:
    """Return the texts of a cell's outputs."""
    return [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client and its libraries
def test_the_notebook_runs(tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(PAGE, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, startup_timeout=240, resources=place).execute()
    cells = {cell.source.split("\n")[-1]: texts(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert cells["result"] == ["RunResult(runs/notebook, finished, 10 steps)"]
    assert cells["stopped"][-1] == "RunResult(runs/stopped, interrupted, 2 steps)"
    assert cells["rlcore.train(**call)"][-1] == "RunResult(runs/stopped, finished, 3 steps)"
    (trained,) = [found for source, found in cells.items() if source.startswith("result = rlcore.train(")]
    shown = [text for text in trained if "step 10/10" in text]
    assert len(shown) == 1, "each step replaces the output of the one before"
    assert not [text for text in trained if "step 9/10" in text]
    lines = "".join(text for found in cells.values() for text in found).splitlines()
    assert "  rlcore.load_run('runs/notebook')" in lines  # and no command, which has not got the function
    assert "  rlcore.train(..., run_dir='runs/stopped') with the same arguments" in lines
    assert not [line for line in lines if "--config" in line]
