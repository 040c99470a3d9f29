"""Answers that are equal and answers that are not, by the conventions of MATH. About 4 s."""

import logging

import pytest

from rlcore.rewards.gsm8k import gsm8k, gsm8k_answer, gsm8k_flexible_answer
from rlcore.rewards.math import math, math_answer

PAIRS = [  # response, reference, score
    (r"\boxed{4210_7}", "4210_5", 0),
    (r"\boxed{1101_2}", "1101_3", 0),
    (r"\boxed{(0,1)}", r"\{0,1\}", 0),
    (r"\boxed{\{3,4\}}", "(3,4)", 0),
    (r"\boxed{0.0000001}", "0.0000002", 0),
    (r"\boxed{6.63\times10^{-34}}", r"1.6\times10^{-19}", 0),
    (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0),
    (r"\boxed{\frac{1}{3\cdot 2^{2006}}}", r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", 0),
    (r"\boxed{6=5}", "5", 0),
    (r"<think> maybe \boxed{42}, but no, it is 41, so", "42", 0),
    (r"\boxed{42.}", "42", 1),
    (r"\boxed{3.50.}", "3.5", 1),
    (r"\boxed{10\,080}", "10080", 1),
    (r"\boxed{1\,000\,000}", "1000000", 1),
    ("<think>\nfirst try \\boxed{41}, no. Redo: 42.\n</think>\n\nThe answer is \\boxed{42}.", "42", 1),
    (r"\boxed{41}? No: \boxed{42}", "42", 1),
    (r"Step 1: \boxed{20}. Step 2: \boxed{22}. Final: \boxed{42}", "42", 1),
    ("<answer>42</answer>", "42", 1),
    ("<answer>1/2</answer>", "1/2", 1),
    ("<answer>x+1</answer>", "x+1", 1),
    (r"\fbox{42}", "42", 1),
    ("Answer:**42**", "42", 1),
    ("答案是42。", "42", 1),
    (r"\boxed{0\le x\le 1}", "[0,1]", 1),
    (r"\boxed{10\%}", "10", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{50\%}", "5", 0),
    (r"\boxed{50}", r"50\%", 1),
    (r"\boxed{0.5}", r"50\%", 1),
    (r"\boxed{45°}", r"45^\circ", 1),
    (r"\boxed{45}", r"45^\circ", 1),
    (r"\boxed{7.}", "7", 1),
    (r"\boxed{7,}", "7", 1),
    (r"\boxed{\emptyset}", r"\varnothing", 1),
    (r"\boxed{5=4}", "4", 0),
    (r"\boxed{x>3}", r"(3,\infty)", 1),
    (r"\boxed{(3,\infty)}", "x>3", 1),
    (r"\boxed{x \geq 3}", r"[3,\infty)", 1),
    (r"\boxed{x \geq 3}", r"(3,\infty)", 0),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{5}", "x=5", 1),
    (r"\boxed{2+3=5}", "5", 1),
    (r"\boxed{y = 2x+3}", "y=2x+3", 1),
    (r"\boxed{y = 2x+3}", "2x+3", 1),
    (r"\boxed{4210_7}", "4210_7", 1),
    (r"\boxed{2112}", "2112_3", 1),
    (r"\boxed{(3,4)}", "(3,4)", 1),
    (r"\boxed{\left(3,\frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
    (r"\boxed{0.333333}", r"\frac13", 1),
    (r"\boxed{0.33}", r"\frac13", 0),
    (r"\boxed{3.14}", r"\pi", 0),
    (r"\boxed{\text{A}}", "A", 1),
    (r"\boxed{\text{Tuesday}}", r"\text{Tuesday}", 1),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\boxed{1} and \boxed{2}", "1,2", 1),
    (r"\boxed{1} and \boxed{2}", "2", 1),
    (r"\boxed{\{1,2\}}", "1,2", 1),
    (r"\boxed{1,2}", r"\{1,2\}", 1),
    ("The final answer is $42$. I hope it is correct.", "42", 1),
    ("So the answer is 42", "42", 1),
    ("<think>x</think> 42", "42", 1),
    (r"<think>\boxed{1}</think> \boxed{42}", "42", 1),
    ("Answer: 42.", "42", 1),
    ("**Answer:** 42", "42", 1),
    (r"**Answer:** $\frac{1}{2}$", "1/2", 1),
    ("Answer: A", "A", 1),
    (r"\boxed{11\sqrt{2}}", r"11\sqrt2", 1),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", 1),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{x^2-1}", "(x-1)(x+1)", 1),
    (r"\boxed{10 \text{ cm}}", "10", 1),
    (r"\boxed{\$5}", "5", 1),
    (r"\boxed{6,-2}", "-2,6", 1),
    (r"\boxed{1:2}", "1:2", 1),
    (r"\boxed{(-\infty,2)\cup(3,\infty)}", r"(-\infty,2)\cup(3,\infty)", 1),
    (r"\boxed{[1,2]}", "(1,2)", 0),
    (r"\boxed{2^{10}}", "1024", 1),
    (r"\boxed{-\frac{1}{2}}", r"\frac{-1}{2}", 1),
    (r"\boxed{3\frac{1}{2}}", "3.5", 1),
    (r"\boxed{1+2i}", "1+2i", 1),
    (r"\boxed{10^{100}}", "10^{100}+1", 0),
]
REFERENCES = [  # of the kinds that MATH has
    r"\frac{14}{3}",
    "9",
    r"\text{Evelyn}",
    "42",
    "27",
    r"90^\circ",
    r"3\sqrt{13}",
    "4",
    "2220",
    r"\frac{3}{56}",
    "284",
    "5",
    r"\sqrt{51}",
    "6 - 5i",
    "-50",
    r"\pi",
    "28",
    "3",
    "6+9i",
    "13535",
    "10",
    "1,-2",
    r"\left( -\infty, \frac{1}{2} \right]",
    "(6,31,-1)",
    r"\begin{pmatrix} -2 & -14 & -7 \\ -10 & -4 & 46 \end{pmatrix}",
    "x^3+3x-6",
    r"\text{(C)}",
    r"70 \sqrt{2}",
    r"x \in [-2,7]",
    r"\frac{2 \sqrt{149}}{3}",
    "2k",
    "144",
    "11111111100",
    "y=2x+5",
    r"\left(\frac{3}{2}, -13\right)",
    r"18\%",
    r"\$12.50",
    r"\frac{270}7\text{ degrees}",
    "(-1,6)",
    "0.35625",
    r"1\frac{4}{5}",
    "52_8",
    r"\text{June 20}",
    r"\{2,4\}",
    "3:4",
    r"10,\!236",
    r"12\text{ cm}^2",
    "5(x-2)(x+2)",
    r"\tan x",
    "p^2-q",
    "2516_8",
    r"\sec x",
    r"(2,\infty)",
    r"[-1,1]\cup[2,3]",
    r"-\frac{35}{9}",
    r"\frac{1+\sqrt5}2",
    ".5",
    "2000.5",
    "x^{2}y",
    r"10\text{ m/s}",
]


@pytest.mark.parametrize(("response", "reference", "score"), PAIRS)
def test_a_response_has_its_score(response, reference, score):
    assert math("", response, reference) == score


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference_equals_itself(reference):
    assert math("", rf"so \boxed{{{reference}}}.", reference) == 1


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("#### 1/2", "1", 0),
        ("#### 18-20", "18", 0),
        ("#### 18 - 20", "18", 0),
        ("#### **18**", "18", 1),
        (r"#### \boxed{18}", "18", 1),
        ("#### 18", "18", 1),
        ("#### -18", "-18", 1),
    ],
)
def test_gsm8ks_strict_form_is_one_number(response, reference, score):
    assert gsm8k("", response, reference) == score


def test_a_response_that_cannot_be_read_is_not_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        math("", r"\boxed{\frac{}{}\sqrt[}{" + "x" * 50, "1")
    assert "xxxxx" not in caplog.text


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{\frac{1}{2}.}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2.}", "1, 2"),
        (r"\boxed{42}, so it is \boxed{42}.", "42"),
        (r"\boxed{}", None),
        (r"<think>\boxed{1}</think> <answer> 42 </answer>", "42"),
        ("Answer: **10\\,080**", "10080"),
        ("so it is $x^2$", "x^2"),
        (r"<think>\boxed{1}", None),
        ("I do not know", None),
    ],
)
def test_the_final_answer_that_votes(response, answer):
    assert math_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("1 + 4 is 5\n#### 5.00", "5", "5"),
        ("#### -1,200", "-1200", "-1200"),
        ("#### -0.0", "0", "0"),
        ("#### 12345678901234567890123456789012345678901.50", "12345678901234567890123456789012345678901.5", None),
        ("it is $7.", None, "7"),
        ("none", None, None),
    ],
)
def test_the_number_that_votes(response, strict, flexible):
    assert gsm8k_answer(response) == strict
    assert gsm8k_flexible_answer(response) == (flexible or strict)
