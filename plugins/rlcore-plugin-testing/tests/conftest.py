"""Algorithms that each break one property, made from one that breaks none."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
SOUND = str(FIXTURES / "sound.py")


@dataclass(frozen=True)
class Break:
    """What is broken: `old` in sound.py becomes `new`; the check that must find it, and words of what it says."""

    check: str
    old: str
    new: str
    says: str


POLICY = "-masked_sum(gain, mask), mask.sum()"
HIDDEN_STATE = ('self.steps = state["steps"]', 'state["steps"]', "belongs in state_dict")
BROKEN = {
    "mean_over_micro_batch": Break(
        "micro_batch_split", POLICY, "-(gain * mask).mean() * mask.sum(), mask.sum()", "term 'policy' was"
    ),
    "mask_leak": Break(
        "masked_tokens",
        "masked_sum(gain, mask)",
        'masked_sum(gain, batch["old_log_probs"] != 0)',
        "response_mask 0 get",
    ),
    "flipped_sign": Break("better_sample", POLICY, "masked_sum(gain, mask), mask.sum()", "higher advantage of row"),
    "hidden_state": Break("resume", *HIDDEN_STATE),
    "hidden_state_of_a_killed_run": Break("kill_and_resume", *HIDDEN_STATE),
    "global_random": Break(
        "same_seed", 'random.Random(f"{run.config.trainer.seed} {run.step}")', "random", "Randomness must come"
    ),
    "pair_split": Break("rows_together", ', keep_together="uid"', "", "keep_together=COLUMN"),
    # And one for each of the other checks that need no Ray.
    "wrong_default": Break("config", 'option(0.01, "', 'option(0.01, min=1, doc="', "pair_coef"),
    "no_update": Break("steps", "run.actor.update(batch, ", "run.actor.update(batch[:0], ", "no row reached update"),
    "infinite_metric": Break("metrics", "steps=self.steps)", "steps=float('inf'))", "steps is inf in step 1"),
    "counts_columns": Break("padding", POLICY, "-masked_sum(gain, mask), mask.numel()", "more columns of padding"),
    "looks_at_the_first_row": Break(
        "row_order", "gain = ratio", "gain = out.log_probs[0, 0].detach() * ratio", "in a different order"
    ),
    "other_old_log_probs": Break(
        "zero_learning_rate",
        'batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))',
        'batch = batch.union(run.actor.log_probs(batch, name="old_log_probs"))\n'
        '        batch["old_log_probs"] = batch["old_log_probs"].map(torch.Tensor.round)',
        "differs from 1",
    ),
    "hidden_nan": Break(
        "non_finite",
        'mask = batch["response_mask"]',
        'mask = batch["response_mask"]\n    out = type(out)({n: value.nan_to_num() for n, value in out.given.items()})',
        "finite loss",
    ),
    "nested_loss": Break(
        "reaches_workers",
        "loss=sound_loss",
        "loss=needs('log_probs', 'entropy')(lambda *given: sound_loss(*given))",
        "not a module-level function",
    ),
}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all suites of the session."""
    from rlcore.config import ClusterConfig
    from rlcore.workers import make_executor

    with make_executor(ClusterConfig(executor="ray")):
        yield


@pytest.fixture(params=list(BROKEN))
def broken(request, tmp_path) -> tuple[Break, str]:
    """A break, and the file of the algorithm that has it."""
    chosen = BROKEN[request.param]
    text = Path(SOUND).read_text()
    assert text.count(chosen.old) == 1
    file = tmp_path / f"{request.param}.py"
    file.write_text(text.replace(chosen.old, chosen.new))
    return chosen, str(file)
