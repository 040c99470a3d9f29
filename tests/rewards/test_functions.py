import json
import math as pymath
from pathlib import Path

import pytest

from rlcore.config.schema import RewardConfig
from rlcore.plugins.specs import RewardSpec
from rlcore.rewards.arithmetic import arithmetic
from rlcore.rewards.compose import resolve
from rlcore.rewards.gsm8k import gsm8k, gsm8k_flexible
from rlcore.rewards.math import math
from rlcore.rewards.scoring import Rewards

# Solutions of the real data set (train rows 1, 27, 146 and test row 1), one with a thousands separator.
GOLD = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether in April"
    " and May.\n#### 72",
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day at the"
    " farmer\u2019s market.\n#### 18",
    "The total is 1000 + 200 = 1,200 dollars.\n#### 1,200",
    "They lost 3 and then 5 more.\n#### -8",
]


@pytest.mark.parametrize(
    ("response", "expected"), [("42", 1.0), (" 42\n", 1.0), ("042", 0.0), ("4 2", 0.0), ("42.", 0.0), ("", 0.0)]
)
def test_arithmetic_is_exact(response, expected):
    assert arithmetic("40+2=", response, "42") == expected
    assert arithmetic("40+2=", response, 42) == expected


@pytest.mark.parametrize("score", [gsm8k, gsm8k_flexible])
def test_each_gold_solution_is_right(score):
    for gold in GOLD:
        number = gold.rpartition("####")[2].strip()
        assert score("q", gold, gold) == 1.0
        assert score("q", gold, number) == 1.0
        assert score("q", gold, f"{number}1") == 0.0


@pytest.mark.parametrize("score", [gsm8k, gsm8k_flexible])
def test_each_gold_solution_of_the_whole_data_set_is_right(score):
    folder = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    for file in ("train.jsonl", "test.jsonl"):
        for line in (folder / file).read_text(encoding="utf-8").splitlines():
            gold = json.loads(line)["answer"]
            assert score("q", gold, gold) == 1.0
            assert score("q", gold, gold.rpartition("####")[2].strip()) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1,234", "1234"),
        ("1234", "1,234"),
        ("1,234,567.50", "1234567.5"),
        ("5.00", "5"),
        ("5", "5.00"),
        (".5", "0.5"),
        ("$18", "18"),
        ("\\$18", "18"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125", "-5"),
        ("-5", -5),
        ("€1,000.00", "1000"),
        ("20%", "20"),
        ("20", "20%"),
        ("42.", "42"),
        ("42 apples", "42"),
        ("007", "7"),
    ],
)
def test_numbers_are_compared_by_value(text, answer):
    assert gsm8k("q", f"so it is\n#### {text}", answer) == 1.0
    assert gsm8k_flexible("q", f"the answer is {text}", answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "strict", "flexible"),
    [
        ("The answer is 42", "42", 0.0, 1.0),
        ("The answer is 42.", "42", 0.0, 1.0),
        ("#### 41\n#### 42", "42", 1.0, 1.0),
        ("#### 42\nThat is 7 times 6", "42", 1.0, 0.0),
        ("####42", "42", 1.0, 1.0),
        ("### 42", "42", 0.0, 1.0),
        ("#### forty-two", "42", 0.0, 0.0),
        ("#### 4,2", "42", 0.0, 0.0),
        ("#### 1,2345", "12345", 0.0, 0.0),
        ("#### 3.14.15", "3.14", 0.0, 0.0),
        ("it is 40-42", "42", 0.0, 1.0),
        ("x = -42", "42", 0.0, 0.0),
        ("between 3 and 42 (of them)", "42", 0.0, 1.0),
        ("", "42", 0.0, 0.0),
        ("####", "42", 0.0, 0.0),
        ("#### 0.1", "0.10000000000000001", 0.0, 0.0),
    ],
)
def test_strict_wants_the_mark_and_flexible_takes_the_last_number(response, answer, strict, flexible):
    assert gsm8k("q", response, answer) == strict
    assert gsm8k_flexible("q", response, answer) == flexible


def test_a_reference_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="'many' holds no number"):
        gsm8k("q", "#### 1", "many")


MATHS = [
    (r"so we get \boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"so we get \boxed{\frac{1}{2}}", r"\frac{2}{4}", 1.0),
    (r"so we get \boxed{\frac{1}{2}}", r"$\frac{1}{3}$", 0.0),
    (
        r"Is it \boxed{3}? No, three is odd, while the text asks for an even number, so the final answer is \boxed{4}",
        "4",
        1.0,
    ),
    (r"The answer is $(x+1)^2$.", "x^2+2x+1", 1.0),
    (r"\boxed{x^2 + 2x}", "x^2+2x+1", 0.0),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
    (r"The answer is 1,234", "1234", 1.0),
    (r"They pay \boxed{18.90}", r"\$18.90", 1.0),
    (r"They pay \boxed{\$18.90}", r"\$18.90", 1.0),
    (r"They pay \boxed{18}", r"\$18.90", 0.0),
    (r"\boxed{2\sqrt{2}}", r"the answer is \boxed{\sqrt{8}}", 1.0),
    ("no idea", "4", 0.0),
]


def test_math_runs_in_the_reward_process():
    config = RewardConfig(timeout=20)
    spec = RewardSpec("math", math, imports=("math_verify",))
    rewards = Rewards(resolve(config, "math", {"math": spec}), config)
    try:
        responses, answers, expected = zip(*MATHS, strict=True)
        scored = rewards.score(["q"] * len(MATHS), responses, answers, {})
        assert scored.failures == [None] * len(MATHS)
        assert tuple(scored.totals) == expected
        (failure,) = rewards.score(["q"], [r"\boxed{1}"], [""], {}).failures
        assert "no expression can be read from the reference answer ''" in failure["cause"]
    finally:
        rewards.close()
    assert not any(pymath.isnan(total) for total in scored.totals)
