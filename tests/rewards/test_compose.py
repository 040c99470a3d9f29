import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from rlcore.config.schema import RewardConfig
from rlcore.errors import ConfigError
from rlcore.plugins.specs import RewardSpec
from rlcore.rewards.arithmetic import arithmetic
from rlcore.rewards.compose import resolve
from rlcore.rewards.gsm8k import gsm8k

FILE = Path(__file__).parent / "functions.py"
INSTALLED = {"arithmetic": RewardSpec("arithmetic", arithmetic), "gsm8k": RewardSpec("gsm8k", gsm8k)}


def names(default="arithmetic", **config):
    return [(reward.name, reward.weight) for reward in resolve(RewardConfig(**config), default, INSTALLED)]


def test_path_goes_before_functions_and_functions_before_the_default():
    assert names() == [("arithmetic", 1.0)]
    assert names(functions={"gsm8k": 0.5, f"{FILE}:length": -1}) == [("gsm8k", 0.5), ("functions.length", -1.0)]
    assert names(functions={"gsm8k": 0.5}, path=f"{FILE}:length") == [("functions.length", 1.0)]


def test_a_spec_in_a_file_says_that_it_is_batched():
    (reward,) = resolve(RewardConfig(path=f"{FILE}:batched"), "", {})
    assert (reward.name, reward.batched) == ("functions.batched", True)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("aritmetic", r"'aritmetic' is not installed; installed are arithmetic, gsm8k. Did you mean 'arithmetic'\?"),
        ("nowhere.py:score", "there is no file .*/nowhere.py"),
        (f"{FILE}:lenght", r"has no function 'lenght'; it has .*Did you mean 'length'\?"),
        (f"{FILE}", "has no function ''.*FILE.py:FUNCTION"),
        (f"{FILE}:NOT_A_FUNCTION", "NOT_A_FUNCTION is a int, not a function"),
        (f"{FILE}:later", "async function"),
        (f"{FILE}:too_few", r"cannot be called with \(prompt, response, answer\).*\(prompt, response\)"),
    ],
)
def test_what_cannot_be_resolved(reference, message):
    with pytest.raises(ConfigError, match=message):
        names(path=reference)


def test_other_bad_configurations(tmp_path):
    with pytest.raises(ConfigError, match="'gsm8k' is nan; a finite number"):
        names(functions={"gsm8k": float("nan")})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("def score(prompt, response, answer):\n    return 1\n")
    with pytest.raises(ConfigError, match=r"two rewards are called 'mine.score'"):
        names(functions={f"{tmp_path}/a/mine.py:score": 1.0, f"{tmp_path}/b/mine.py:score": 1.0})
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match="cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"):
        names(path=f"{tmp_path}/broken.py:score")


def test_a_file_travels_by_value_and_leaves_no_trace(tmp_path):
    # Called like a standard module, with a dataclass (which looks its module up) and a helper of its own.
    file = tmp_path / "random.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Weight:\n"
        "    value: float\n\ndef helper(text):\n    return Weight(float(len(text)))\n\n"
        "def score(prompt, response, answer):\n    return helper(response).value\n"
    )
    modules, registered = set(sys.modules), cloudpickle.list_registry_pickle_by_value()
    (reward,) = resolve(RewardConfig(path=f"{file}:score"), "", {})
    assert set(sys.modules) == modules
    assert cloudpickle.list_registry_pickle_by_value() == registered
    file.unlink()
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer)('p', 'four', 'a'))"
    done = subprocess.run([sys.executable, "-c", script], input=reward.data, capture_output=True, cwd="/", check=True)
    assert done.stdout == b"4.0\n"
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_no_torch():
    script = (
        "import sys, rlcore.rewards.compose, rlcore.rewards.scoring, rlcore.rewards.child, rlcore.rewards.math\n"
        "print(sorted({'torch', 'ray', 'transformers', 'math_verify'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
