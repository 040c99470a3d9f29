"""A batched reward sees whole groups, whatever the number of reward workers. About 4 s."""

import pytest

BEST = """
from rlcore import RewardSpec

def best(prompts, responses, answers, uid):
    \"\"\"1 for the last sample of each prompt that the call sees, and the number of samples seen for the others.\"\"\"
    last = {name: row for row, name in enumerate(uid)}
    return [1.0 if last[name] == row else float(uid.count(name)) for row, name in enumerate(uid)]

score = RewardSpec("best", best, batched=True)
"""


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_call_has_all_samples_of_a_prompt(train_small, samples_of, tmp_path, workers):
    """Three prompts of four rows: an even cut for two workers would halve a group."""
    (tmp_path / "best.py").write_text(BEST)
    options = ["algo.group_size=4", "data.batch_size=3", "trainer.total_steps=1", f"reward.workers={workers}"]
    options += ["~reward", "reward.functions={}", f"reward.path={tmp_path}/best.py:score"]
    train_small(tmp_path / "run", *options)
    rows = samples_of(tmp_path / "run")[1]
    assert [row["scores"] for row in rows] == [4.0, 4.0, 4.0, 1.0] * 3
    assert [row["uid"] for row in rows] == [uid for uid in dict.fromkeys(row["uid"] for row in rows) for _ in range(4)]
