from __future__ import annotations

import subprocess
import sys

from rlcore.data.builtin import rlcore_datasets


def test_the_names_and_their_rewards() -> None:
    assert {spec.name: spec.reward for spec in rlcore_datasets()} == {
        "arithmetic": "arithmetic",
        "gsm8k": "gsm8k",
        "file": "math",
    }


def test_registration_imports_nothing_heavy() -> None:
    code = "import sys, rlcore.data.builtin; print({'torch', 'transformers', 'datasets', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
