"""The reference answer of a row, as the rewards that compare texts read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def reference_text(answer: Any) -> str:
    """Return the answer as text; ValueError for None, NaN and an object, which are no answers."""
    if answer is None or isinstance(answer, Mapping) or (isinstance(answer, float) and math.isnan(answer)):
        raise ValueError(f"the row has no reference answer, but {str(answer)[:80]!r} ({type(answer).__name__})")
    return str(answer)
