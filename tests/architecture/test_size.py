"""The core stays small: lines of code under rlcore/, without its engines, which are plugins, and episodes."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2] / "rlcore"
MOST = 14_300
MOST_OF_EPISODES = 5_600
EPISODES = ("episodes", "sandbox")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> int:
    """Return the number of lines that hold code: no comment, docstring or blank line counts."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_lines_are_counted():
    assert (
        lines_of_code('"""Doc.\n\nmore"""\n\n# why\nx = (1,\n     2)  # two lines\n\n\ndef f():\n    """Doc."""\n') == 3
    )


def lines_in(*, without: tuple[str, ...] = (), of: tuple[str, ...] = ()) -> int:
    rooms = {path: path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")}
    files = [path for path, room in rooms.items() if room not in without and (not of or room in of)]
    return sum(lines_of_code(path.read_text()) for path in files)


def test_the_core_without_engines_and_episodes_is_small():
    assert lines_in(without=("engines", *EPISODES)) <= MOST


def test_episodes_are_small():
    assert 1000 < lines_in(of=EPISODES) <= MOST_OF_EPISODES
