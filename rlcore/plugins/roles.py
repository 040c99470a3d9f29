"""Roles: the models that an algorithm declares, and the three kinds of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlcore.ops import Need

Head = Literal["vocabulary", "number"]
"""The output of a model's last layer for each token: a logit for each token of the vocabulary, or one number."""


@dataclass(frozen=True, repr=False)
class RoleKind:
    """A kind of role: POLICY, CRITIC or REWARD. Ask its fields, or compare kinds with `==`.

    `noun`: the kind in a message. `head`: the last layer, which also decides how the model is loaded. `gives`: the
    outputs that a loss may need. `scores_rows`: one output for each row, at its last token, instead of one for each
    response token. `reads_text`: a frozen one may have a tokenizer other than the actor's, and then reads texts.
    """

    name: str
    noun: str
    head: Head
    gives: tuple[Need, ...]
    scores_rows: bool = False
    reads_text: bool = False

    @property
    def is_language_model(self) -> bool:
        """Whether it has the vocabulary as its head, so that it gives log-probs and can generate."""
        return self.head == "vocabulary"

    def __str__(self) -> str:
        return self.noun

    def __repr__(self) -> str:
        return self.name.upper()


POLICY = RoleKind("policy", "policy", "vocabulary", gives=("log_probs", "entropy", "logits"))
"""A causal language model: `log_probs`, and `generate` if its role generates."""
CRITIC = RoleKind("critic", "critic", "number", gives=("values",))
"""A model with one value for each response token: `values`."""
REWARD = RoleKind("reward", "reward model", "number", gives=("scores",), scores_rows=True, reads_text=True)
"""A model with one score for each row: `score`."""
KINDS = (POLICY, CRITIC, REWARD)


@dataclass(frozen=True)
class Role:
    """A model that an algorithm needs, described by its use.

    `kind` decides its outputs: a POLICY gives `log_probs`; a CRITIC gives `values`, one for each response token; a
    REWARD model gives `scores`, one for each row. `trains`: it has an optimizer and `update`. `generates`: it has a
    rollout engine and `generate`. Without both it is frozen. `follows` names the role whose weights `follow` copies.

    The other fields replace the run's settings unless they are None: `model` its folder (`model.path`), `dtype` its
    precision (`model.dtype`), `lr` its learning rate (`engine.lr`), `engine` its train engine (`engine.name`),
    `rollout` some keys of `rollout`, such as `name`. `roles.NAME.*` of the config overrides them.
    """

    trains: bool = False
    generates: bool = False
    kind: RoleKind = POLICY
    model: str | None = None
    lr: float | None = None
    follows: str | None = None
    engine: str | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    rollout: Mapping[str, Any] = field(default_factory=dict)

    @property
    def may_start_headless(self) -> bool:
        """Whether it may start from a folder without its head, and gets a new one of zeros: it trains or follows."""
        return self.trains or self.follows is not None
