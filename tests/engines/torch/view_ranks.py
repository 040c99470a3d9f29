"""Run by test_views.py, once a rank: updates on two ranks with a loss that reads logits, and with a critic's.

Arguments: rank, a file for the process group, the model folder. Prints nothing; a warning that is an error ends it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
import engine_models

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engines.torch.config import TorchConfig
from rlcore.engines.torch.engine import TorchEngine
from rlcore.ops import masked_sum, needs, objective
from rlcore.plugins import CRITIC, POLICY


@needs("logits", "log_probs", "entropy")
def of_logits(out, batch, config):
    mask = batch["response_mask"]
    chosen = out.logits.log_softmax(-1).gather(-1, batch["responses"][..., None]).squeeze(-1)
    return {"loss": objective(-masked_sum(chosen + out.log_probs + out.entropy, mask), mask.sum())}


@needs("values")
def of_values(out, batch, config):
    mask = batch["response_mask"]
    return {"loss": objective(masked_sum((out.values - 1) ** 2, mask), mask.sum())}


rank, file, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
for kind, loss, own in (
    (POLICY, of_logits, TorchConfig()),
    (POLICY, of_logits, TorchConfig(padding_free=False, layerwise_above=0)),
    (CRITIC, of_values, TorchConfig()),
):
    torch.manual_seed(0)
    setup = TrainSetup(ModelConfig(path=folder), EngineConfig(lr=1e-3), own, Ranks(rank, 2), trains=True, kind=kind)
    engine = TorchEngine(setup)
    batch = engine_models.random_batch(2, 2, seed=rank)
    engine.update([UpdateItem(batch, [len(batch)], loss, None)], epochs=1, step=0)
dist.destroy_process_group()
