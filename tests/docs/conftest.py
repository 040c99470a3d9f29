"""One small real run, in this process, that the pages are compared with."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcore.plugins import PluginManager
from rlcore.protocol import DataProto

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Seen:
    """The folder of a run, the names of its metrics, and the batch of one step made by the page's own lines."""

    folder: Path
    metrics: set[str]
    batch: DataProto


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    import rlcore_grpo

    from rlcore.config import compose
    from rlcore.data.chat import load_tokenizer
    from rlcore.data.loader import PromptLoader
    from rlcore.ops import episodes, group_advantages
    from rlcore.rewards.compose import resolve
    from rlcore.training.run import open_run
    from rlcore.training.trainer import train

    folder = tmp_path_factory.mktemp("seen")
    overrides = ["algo=grpo", "cluster=in_process", "tracker=none", "engine.offload=true", "trainer.total_steps=2"]
    overrides += [
        "data.max_rows=128",
        "data.eval_size=2",
        "data.batch_size=2",
        "rollout.response_len=4",
        "reward.functions={arithmetic: 1, gsm8k_flexible: 1}",
    ]
    plugins = PluginManager.load()
    config = compose([*overrides, f"run.dir={folder / 'run'}"], plugins)
    train(config, plugins)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = {name for line in lines for name in json.loads(line)}

    page = (ROOT / "docs" / "architecture.md").read_text()
    (step,) = re.findall(r"^```python run=grpo-step\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    dataset = plugins.datasets()[config.data.name]
    prompts = PromptLoader(config.data, dataset, load_tokenizer(config.model), seed=0).next_batch()
    roles = rlcore_grpo.GRPO(config.algo).roles()
    with open_run(config, folder, plugins, roles, resolve(config.reward, "", plugins.rewards())) as run:
        run.begin_step(1)
        names = {"run": run, "config": config.algo, "prompts": prompts}
        names |= {"group_advantages": group_advantages, "episodes": episodes, "grpo_loss": rlcore_grpo.grpo_loss}
        exec(step, names)
        run.end_step()
    assert names["metrics"]["train/optimizer_steps"] == 1
    return Seen(folder / "run", metrics, names["batch"])
