"""Rule-based rewards, their composition, and the isolation of reward code. Nothing but worker.py imports torch.

`compose` resolves the configuration to functions, `scoring` scores rows with them, `sandbox` and `child` are the
process that their code runs in, `worker` is the worker-group class. (This file imports nothing: every reward process
loads it.)
"""
