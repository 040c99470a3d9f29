"""Plain values to frozen dataclasses: every check of key, type and range."""

# ruff: noqa: RUF009

from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, Literal

import pytest

from rlcore.config import DataConfig, build, option
from rlcore.config.build import check_schema, defaults, to_plain, type_name
from rlcore.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    size: int = option(2, "a size", min=1, max=8)


@dataclass(frozen=True)
class Outer:
    name: str = option(doc="what it is called")
    rate: float = option(0.5, min=0.0, max=1.0)
    count: int = 3
    on: bool = False
    level: Literal["low", "high", 3] = "low"
    maybe: int | None = option(None, min=1)
    either: int | str = 1
    names: list[str] = option(["a"])
    weights: dict[str, float] = option({})
    nested: list[list[int]] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)
    free: Any = None


def make(**values):
    return build(Outer, {"name": "x", **values})


def test_defaults_fill_what_is_not_given():
    made = make()
    assert made == Outer(name="x")
    assert (made.rate, made.names, made.inner) == (0.5, ["a"], Inner(2))
    with pytest.raises(FrozenInstanceError):
        made.count = 4


def test_default_lists_are_not_shared():
    assert make().names is not make().names


def test_all_values_arrive():
    values = {
        "name": "y",
        "rate": 1,
        "count": 5,
        "on": True,
        "level": 3,
        "maybe": 7,
        "either": "text",
        "names": [],
        "weights": {"a": 2, "b": 0.5},
        "nested": [[1], []],
        "inner": {"size": 8},
        "free": {"any": ["thing"]},
    }
    made = build(Outer, values)
    assert to_plain(made) == values
    assert isinstance(made.rate, float)
    assert [type(weight) for weight in made.weights.values()] == [float, float]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, r"unknown key 'cuont'. Did you mean 'count'\? Allowed at the top: name, rate, count"),
        ({"inner": {"sise": 1}}, r"unknown key 'inner.sise'. Did you mean 'inner.size'\? Allowed under 'inner': size"),
        ({"inner": 3}, r"inner = 3 must be a mapping"),
        ({"count": True}, r"count = True has the wrong type: it is bool and must be int"),
        ({"count": 1.0}, r"count = 1.0 has the wrong type: it is float and must be int"),
        ({"count": "3"}, r"count = '3' has the wrong type: it is text and must be int"),
        ({"count": None}, r"count = None has the wrong type: it is null and must be int"),
        ({"rate": True}, r"rate = True has the wrong type: it is bool and must be float"),
        ({"rate": float("nan")}, r"rate = nan has the wrong type"),
        ({"rate": 1.5}, r"rate = 1.5 is out of bounds: it must be at least 0 and at most 1"),
        ({"inner": {"size": 0}}, r"inner.size = 0 is out of bounds: it must be at least 1"),
        ({"maybe": 0}, r"maybe = 0 is out of bounds"),
        ({"on": 1}, r"on = 1 has the wrong type: it is int and must be bool"),
        ({"on": "yes"}, r"on = 'yes' has the wrong type"),
        ({"name": 5}, r"name = 5 has the wrong type: it is int and must be str; quote it .*: name='\"5\"'"),
        ({"level": "hihg"}, r"level = 'hihg' is not one of low, high, 3. Did you mean 'high'\?"),
        ({"level": 3.0}, r"level = 3.0 is not one of low, high, 3"),
        ({"maybe": "x"}, r"maybe = 'x' has the wrong type"),
        ({"either": 1.5}, r"either = 1.5 has the wrong type: it is float and must be int \| str"),
        ({"names": "a"}, r"names = 'a' has the wrong type: it is text and must be list\[str\]; write names=\[...\]"),
        ({"names": ["a", 1]}, r"names\[1\] = 1 has the wrong type"),
        ({"nested": [[1], ["x"]]}, r"nested\[1\]\[0\] = 'x' has the wrong type"),
        ({"weights": [1]}, r"weights = \[1\] has the wrong type: it is a list and must be dict\[str, float\]"),
        ({"weights": {"a": "b"}}, r"weights.a = 'b' has the wrong type"),
        ({"name": "???"}, r"name must be given \(str: what it is called\): name=VALUE"),
    ],
)
def test_wrong_values(values, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        make(**values)


def test_missing_required_value_names_the_full_key():
    with pytest.raises(ConfigError, match=r"algo.name must be given"):
        build(Outer, {}, "algo")


def test_defaults_as_plain_values():
    plain = defaults(Outer)
    assert plain["name"] == "???"
    assert plain["inner"] == {"size": 2}
    assert plain["names"] == ["a"]
    assert list(plain) == list(Outer.__dataclass_fields__)


def test_schema_of_supported_types():
    check_schema(Outer)
    check_schema(DataConfig)


@dataclass(frozen=True)
class Tuples:
    pair: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class BareList:
    items: list = option([])


@dataclass
class Mutable:
    size: int = 1


@dataclass(frozen=True)
class Deep:
    inner: Mutable = field(default_factory=Mutable)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Tuples, "Tuples.pair has the type"),
        (BareList, "BareList.items has the type list"),
        (Mutable, "Mutable must be a frozen dataclass"),
        (Deep, "Mutable must be a frozen dataclass"),
    ],
)
def test_schema_of_other_types(cls, message):
    with pytest.raises(ConfigError, match=message):
        check_schema(cls)


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (int, "int"),
        (int | None, "int | null"),
        (list[str], "list[str]"),
        (dict[str, float], "dict[str, float]"),
        (Literal["a", 1], "a | 1"),
        (Any, "any"),
        (Inner, "Inner"),
    ],
)
def test_type_names(hint, name):
    assert type_name(hint) == name
