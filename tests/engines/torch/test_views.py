"""What a sharded model returns is not a view.

torch warns of views, as an in-place operation on one drops the hook that gathers the weights for the backward.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("view_ranks.py")


@pytest.mark.timeout(200)
@pytest.mark.ray  # like those it starts processes
def test_losses_over_logits_and_values_on_two_ranks_warn_of_nothing(write_random, tmp_path):
    import transformers

    write_random(transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}, tmp_path / "model")
    command = [sys.executable, "-W", "error:FSDP2-wrapped module:UserWarning", str(SCRIPT)]
    arguments = [str(tmp_path / "group"), str(tmp_path / "model")]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors[0][-3000:]
