"""Reference and critic on pools of their own: both at once, and each alone. Real model workers, one each.

python overlap.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import side
import torch

from rlcore.config import compose
from rlcore.plugins import CRITIC, PluginManager, Role
from rlcore.protocol import DataProto, Ragged
from rlcore.roles.handles import CriticHandle, PolicyHandle, StepClock
from rlcore.roles.placement import plan_pools
from rlcore.roles.start import RoleStart, start_roles
from rlcore.workers import make_executor

ROLES = {"ref": Role(), "critic": Role(kind=CRITIC, trains=True)}
POOLS = "cluster.pools={main: [ref, reward], side: [critic]}"
ROWS, TOKENS = 192, 48


def rows() -> DataProto:
    """Return prompts and responses."""
    random = np.random.default_rng(0)
    lengths = torch.full((ROWS,), TOKENS)
    tokens = [torch.from_numpy(random.integers(2, 20, ROWS * TOKENS)) for _ in range(2)]
    return DataProto.from_dict(
        {n: Ragged.from_lengths(t, lengths) for n, t in zip(("prompts", "responses"), tokens, strict=True)}
    )


def main(folder: str) -> None:
    """Serve `call`."""
    side.start_ray()
    plugins = PluginManager.load()
    config = compose(["experiment=ppo", "cluster.workers=1", f"run.dir={folder}", POOLS], plugins)
    executor = make_executor(config.cluster, log_dir=Path(folder))
    with executor:
        pools = [(planned, planned.open(executor)) for planned in plan_pools(config, ROLES)]
        roles, _ = start_roles(RoleStart(config, plugins, ROLES, StepClock()), executor, pools)
        side.serve({"call": lambda rounds: call(roles["ref"], roles["critic"], rounds)})


def call(ref: PolicyHandle, critic: CriticHandle, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, `rounds` times in turn."""
    batch = rows()
    ways = {
        "ref": lambda: [ref.log_probs(batch)],
        "critic": lambda: [critic.values(batch)],
        "both": lambda: [ref.log_probs(batch), critic.values(batch)],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            for made in way():
                made.materialize()
            times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main(sys.argv[1])
