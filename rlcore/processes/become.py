"""A script that becomes a program, which dies with the process PARENT: `python -I -S become.py PARENT WORD ...`."""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    import child  # type: ignore[import-not-found]  # without rlcore, whose imports would cost each program a second

    parent, words = int(sys.argv[1]), sys.argv[2:]
    child.die_with_parent(parent)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")
