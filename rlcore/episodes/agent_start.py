"""A script that becomes an agent's process: `python agent_start.py PARENT WORD ...`. It imports nothing of rlcore."""

import os
import sys

if __name__ == "__main__":
    parent, words = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the agent dies with the run, and keeps this
        if os.getppid() != parent:  # the run died before the line above
            sys.exit(1)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")
