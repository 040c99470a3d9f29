from pathlib import Path

import pytest

from rlcore.plugins import installed

STAND_IN = Path(__file__).parents[1] / "fixtures" / "plugins" / "stand_in.py"


@pytest.fixture(scope="session")
def stand_in() -> list[str]:
    """Options that put the stand-in in the place of rlcore's own plugins but the commands: the same names, no torch."""
    blocked = [f"no:{entry.name}" for entry in installed() if not entry.value.startswith("rlcore.commands.")]
    return [word for name in (*blocked, str(STAND_IN)) for word in ("-p", name)]
