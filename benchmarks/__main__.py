"""`python -m benchmarks NAME`, or `all`. The exit status is 1 when a bar does not hold."""

from __future__ import annotations

import sys

from benchmarks import data_plane, layouts, learning, reshard, weight_sync

BENCHMARKS = {
    "learning": learning.main,
    "data_plane": data_plane.main,
    "layouts": layouts.main,
    "reshard": reshard.main,
    "weight_sync": weight_sync.main,
}


def main(argv: list[str]) -> int:
    """Run the named benchmarks."""
    names = list(BENCHMARKS) if argv in ([], ["all"]) else argv
    for name in names:
        if name not in BENCHMARKS:
            print(f"no benchmark {name!r}; there are: all, {', '.join(BENCHMARKS)}", file=sys.stderr)
            return 2
    held = [BENCHMARKS[name]() for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
