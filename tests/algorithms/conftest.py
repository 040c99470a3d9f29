"""Steps of an algorithm in this process, on four prompts."""

import pytest

from rlcore.config import compose
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import PromptSplit
from rlcore.plugins import DatasetSpec, PluginManager
from rlcore.rewards.compose import resolve

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in [(3, 4), (12, 5), (40, 17), (8, 8)]]


ALTERNATING = """
from rlcore import RewardSpec

def zero_one(prompt, response, answer):
    return [float(row % 2) for row in range(len(prompt))]

score = RewardSpec("zero_one", zero_one, batched=True)
"""


@pytest.fixture
def take_steps(tmp_path):
    """Take `steps` steps and return the metrics and the scored batch of each, and the names of the roles.

    Rewards are 0, 1, 0, 1, ... in row order unless `reward.path` says otherwise, so no group's are equal. `then(run)`
    is called after the last step, while the models are there. What the steps logged is among their metrics.
    """
    from rlcore.training.run import open_run

    (tmp_path / "alternating.py").write_text(ALTERNATING)
    base = ["algo=grpo", "cluster=in_process", "rollout.response_len=6", "engine.lr=1e-3"]
    base.append(f"reward.path={tmp_path / 'alternating.py'}:score")

    def take(*overrides: str, steps: int = 1, then=lambda run: None):
        plugins = PluginManager.load()
        config = compose([*base, *overrides], plugins)
        algorithm = plugins.algorithm(config.algorithm).algorithm(config.algo)
        data = DatasetSpec("four", lambda config, split: ROWS, reward="arithmetic")
        split = PromptSplit(config.data, data, load_tokenizer(config.model), "train")
        rewards = resolve(config.reward, data.reward, plugins.rewards())
        metrics, batches = [], []
        with open_run(config, tmp_path, plugins, algorithm.roles(), rewards) as run:
            for step in range(1, steps + 1):
                run.begin_step(step)
                returned = algorithm.step(run, split.batch(split.usable, step))
                logged, scored = run.end_step()
                metrics.append({**returned, **logged})
                batches.extend(scored)
            then(run)
            return metrics, batches, set(run.roles)

    return take
