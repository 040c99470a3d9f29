"""Rule-based rewards, their composition, and the isolation of reward code. Only worker.py imports torch.

`compose` resolves the configuration to functions, and `scoring` scores rows with them. Their code runs in the process
of `child`, which `process` controls. `worker` is the worker class. (This file imports nothing: every reward process
loads it.)
"""
