"""All checks of a run's config, before anything starts: one list for `train`, `eval`, `config`, `plan` and the suites.

Checks of data and reward functions come later: they read files and run code, so only a run that starts has them.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from rlcore.config import Config, DataConfig, RolloutConfig
from rlcore.config.devices import local_gpus
from rlcore.config.eval_sets import REPLACED_BY_MIX, naming, set_config, source_config
from rlcore.config.schema import MEASURED
from rlcore.episodes.from_config import check_environment
from rlcore.errors import ConfigError
from rlcore.ops.importance import MASKS
from rlcore.plugins import Algorithm, Role
from rlcore.plugins.specs import environment_of
from rlcore.roles.checks import check_engines
from rlcore.roles.placement import Placement, restrict_to_roles
from rlcore.roles.settings import evaluated_roles, has_own_settings, resolve_roles, role_config, with_settings
from rlcore.training.evaluate import OWN
from rlcore.training.goals import check_goals
from rlcore.training.run import check_roles

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager

Purpose = Literal["train", "evaluate", "plan"]
ALWAYS: tuple[Purpose, ...] = ("train", "evaluate", "plan")


class Preflight:
    """A run's config and the objects made from it, each once: algorithm, engines, roles and placement.

    An evaluation may have no algorithm. A property raises ConfigError when its object cannot be made.
    """

    def __init__(self, config: Config, plugins: PluginManager, purpose: Purpose) -> None:
        self.config, self.plugins, self.purpose = config, plugins, purpose

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm with its config."""
        if not self.config.algorithm:
            names = ", ".join(self.plugins.algorithms()) or "(none)"
            raise ConfigError(f"no algorithm is chosen: add algo=NAME, one of {names}")
        spec = self.plugins.algorithm(self.config.algorithm)
        return self.plugins.call(spec, "__init__", spec.algorithm, self.config.algo)

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """The algorithm's roles, and the reward model of `reward.model`; for most evaluations the actor alone."""
        if self.purpose == "evaluate":
            declared = evaluated_roles(self.algorithm if self.config.algorithm else None)
            return with_settings(declared, restrict_to_roles(self.config, declared))
        algorithm = self.algorithm
        spec = self.plugins.algorithm(self.config.algorithm)
        return resolve_roles(self.plugins.call(spec, "roles", algorithm.roles), self.config)

    @cached_property
    def own_configs(self) -> Mapping[str, Config]:
        """The config as a role sees it, of each role with settings of its own."""
        configs = {name: role_config(self.config, name, role) for name, role in self.roles.items()}
        return {name: own for name, own in configs.items() if has_own_settings(self.config, own)}

    @cached_property
    def placement(self) -> Placement:
        """The pools on which the roles run. `cluster.pools=auto` is a ConfigError: a plugin has to answer it first."""
        return Placement.of(self.config, self.roles, self.plugins)


def preflight(config: Config, plugins: PluginManager, purpose: Purpose = "train") -> Preflight:
    """Run the checks of a purpose in order and return their results.

    purpose: "train"; "evaluate", which needs no algorithm; or "plan", for other machines than this one.
    Raises ConfigError for the first fault, with the key, its value and a remedy.
    """
    flight = Preflight(config, plugins, purpose)
    for check in CHECKS:
        if purpose in check.purposes:
            check.function(flight)
    return flight


# The checks.


def _names(flight: Preflight) -> None:
    flight.plugins.check_names(flight.config)


def _reward(flight: Preflight) -> None:
    reward = flight.config.reward
    if reward.path is not None and reward.functions:
        raise ConfigError(
            f"reward.path = {reward.path!r} is used alone; leave out reward.functions, or name the file there: "
            f"'reward.functions={{{reward.path.replace(':', chr(92) + ':')}: 1.0}}'"
        )
    if reward.path is not None:
        _reward_file(f"reward.path = {reward.path!r}", reward.path)
    for name in reward.functions:
        if ":" in name:
            _reward_file(f"reward.functions: {name!r}", name)
    if reward.special_tokens and environment_of(flight.config):
        raise ConfigError(
            "reward.special_tokens=true cannot be used with an environment, whose rows are whole conversations; leave "
            "it out, and read `episode_messages`"
        )
    if reward.error_value is not None and not math.isfinite(reward.error_value):
        raise ConfigError(
            f"reward.error_value is {reward.error_value}; give a finite number, or null to leave failed samples out"
        )
    if reward.functions and not any(reward.functions.values()) and reward.model is None:
        raise ConfigError("reward.functions has only weights of 0, so every reward is 0; give one another weight")


def _curriculum(flight: Preflight) -> None:
    config = flight.config
    of_sources = [source_config(config, name).data.curriculum for name in config.data.mix]
    if not any(each.measures for each in [config.data.curriculum, *of_sources]):
        return
    if not flight.algorithm.uses_reward:
        raise ConfigError(
            f"algo={config.algorithm} scores no samples, so data.curriculum.by={MEASURED} and data.curriculum.skip "
            "have no rewards to go by; leave them out, or order by a column"
        )
    if config.trainer.rollouts_ahead:
        raise ConfigError(
            f"data.curriculum.by={MEASURED} and data.curriculum.skip go by the rewards of all steps before, but with "
            f"trainer.rollouts_ahead={config.trainer.rollouts_ahead} a step begins before the last one has any; leave "
            "one of them out, or order by a column"
        )


def _date(flight: Preflight) -> None:
    given = flight.config.model.date
    try:
        if given is not None:
            datetime.date.fromisoformat(given)
    except ValueError as error:
        raise ConfigError(
            f"model.date={given} is no date ({error}); give one like 2026-11-28, or leave it out"
        ) from error


def _data(flight: Preflight) -> None:
    data = flight.config.data
    for key in ("subset", "train_split", "eval_split"):
        if data.path is None and (value := getattr(data, key)) is not None:
            raise ConfigError(f"data.{key}={value} chooses in data.path, which is not set; set it, or drop the key")
    if data.prompt_key in data.rendered and (data.system_prompt or environment_of(flight.config)):
        what = "data.system_prompt" if data.system_prompt else f"env={environment_of(flight.config)}"
        raise ConfigError(
            f"data.rendered names the prompts' column {data.prompt_key!r}, which are the model's input as they are; "
            f"{what} has no place in them, so leave out one of the two"
        )


def _mix(flight: Preflight) -> None:
    config, standard = flight.config, DataConfig()
    if not config.data.mix:
        return
    for key in REPLACED_BY_MIX:
        if (value := getattr(config.data, key)) != getattr(standard, key):
            raise ConfigError(
                f"data.{key}={value} is of one data set, and data.mix has several; write it below a source, as "
                f"data.mix.{next(iter(config.data.mix))}.data.{key}"
            )
    if config.reward.model is not None:
        raise ConfigError(
            f"reward.model = {config.reward.model} scores the responses to all prompts alike, and data.mix those of "
            "each source by its own functions; leave out one of the two"
        )
    for name, source in config.data.mix.items():
        if not 0 < source.weight < math.inf:
            raise ConfigError(
                f"data.mix.{name}.weight = {source.weight:g} must be a number above 0; or drop the source"
            )
        if name in config.eval.sets:
            raise ConfigError(
                f"{name!r} is a source of data.mix and an evaluation of eval.sets, and both have the metrics "
                f"eval/{name}/NAME; rename one of them"
            )
        with naming(f"data.mix.{name}"):
            own = Preflight(source_config(config, name), flight.plugins, flight.purpose)
            for check in (_reward, _data):
                check(own)
        if own.config.data.prompt_len > config.data.prompt_len:
            raise ConfigError(
                f"data.mix.{name}.data.prompt_len = {own.config.data.prompt_len} is more than data.prompt_len = "
                f"{config.data.prompt_len}, for which the engines start; raise data.prompt_len"
            )


def _reward_file(what: str, reference: str) -> None:
    file, _, function = reference.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"{what} must be FILE.py:FUNCTION, as in my.py:score")


def _rollout(flight: Preflight) -> None:
    _check_rollout(flight.config.rollout)


def _check_rollout(rollout: RolloutConfig) -> None:
    if rollout.min_tokens > rollout.response_len:
        raise ConfigError(
            f"rollout.min_tokens = {rollout.min_tokens} is more than rollout.response_len = {rollout.response_len}"
        )
    if rollout.top_p == 0:
        raise ConfigError("rollout.top_p = 0 leaves no token; 1 samples from all, rollout.temperature=0 is greedy")
    if "" in rollout.stop:
        raise ConfigError("rollout.stop holds an empty text, which would end every response at once; remove it")


def _engines(flight: Preflight) -> None:
    check_engines(flight.config, flight.plugins)


def _trainer(flight: Preflight) -> None:
    trainer = flight.config.trainer
    if trainer.epochs is not None and flight.config.data.mix:
        raise ConfigError(
            f"trainer.epochs = {trainer.epochs} is not defined for data.mix, whose sources have epochs of their own; "
            "give trainer.total_steps"
        )
    if trainer.epochs is not None and (skip := flight.config.data.curriculum.skip):
        raise ConfigError(
            f"trainer.epochs = {trainer.epochs} has no number of steps with data.curriculum.skip = {skip:g}, which "
            "leaves rows out of an epoch by what is measured; give trainer.total_steps"
        )
    if trainer.eval_samples > 1 and trainer.eval_temperature == 0:
        raise ConfigError(
            f"trainer.eval_samples = {trainer.eval_samples} greedy responses to one prompt are all equal: set "
            "trainer.eval_temperature above 0, or trainer.eval_samples=1"
        )
    if trainer.correction not in ("off", *MASKS) and trainer.importance_cap == 0:
        raise ConfigError(
            f"trainer.importance_cap = 0 gives every sample the weight 0, so with trainer.importance = "
            f"{trainer.importance} nothing would be learned; set it above 0, as 2.0"
        )
    band = trainer.importance_band
    if len(band) != 2 or not 0 <= band[0] < 1 < band[1]:
        raise ConfigError(
            f"trainer.importance_band = {band} must be two numbers, from 0 or more to above 1, with 1 between them: "
            "equal policies have that ratio. Use [0.5, 5.0]"
        )


def _cluster(flight: Preflight) -> None:
    cluster = flight.config.cluster
    if cluster.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "cluster.executor = ray, but ray is not installed: pip install ray, or choose cluster=in_process"
        )
    if cluster.executor == "in_process":
        if cluster.workers != 1:
            raise ConfigError(
                f"cluster.executor = in_process runs engines in this process, so cluster.workers must be 1, not "
                f"{cluster.workers}: choose cluster=in_process, which sets both, or cluster=local for Ray"
            )
        if cluster.address is not None:
            raise ConfigError("cluster.address needs cluster.executor=ray")
        if cluster.gpus_per_worker > 0 and not (found := local_gpus()).count:
            raise ConfigError(
                f"cluster.gpus_per_worker = {cluster.gpus_per_worker:g}, but here is {found}. Set "
                "cluster.gpus_per_worker=0 or auto; a run that began on a GPU can only be resumed on one"
            )
    gpus = cluster.gpus_per_worker
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"cluster.gpus_per_worker = {gpus} must be a whole number or a share below 1")


def _sections(flight: Preflight) -> None:
    for spec in flight.plugins.configs().values():
        if spec.check is not None:
            flight.plugins.call(spec, "check", spec.check, flight.config)


def _environment(flight: Preflight) -> None:
    check_environment(flight.config, flight.plugins)


def _engine_specs(flight: Preflight) -> None:
    _check_by_engines(flight.config, flight.plugins)


def _check_by_engines(config: Config, plugins: PluginManager, *, generates: bool = True) -> None:
    """Ask the engines that a config names for their own checks, the rollout engine only where it `generates`."""
    train, rollout = plugins.train_engines()[config.engine.name], plugins.rollout_engines()[config.rollout.name]
    if generates and rollout.check is not None:
        plugins.call(rollout, "check", rollout.check, config)
    if train.check is not None:
        plugins.call(train, "check", train.check, config)


def _role_settings(flight: Preflight) -> None:
    for name, own in flight.own_configs.items():
        with _naming(name):
            _check_rollout(own.rollout)
            check_engines(own, flight.plugins)


def _role_engine_specs(flight: Preflight) -> None:
    for name, own in flight.own_configs.items():
        with _naming(name):
            _check_by_engines(own, flight.plugins, generates=flight.roles[name].generates)


@contextmanager
def _naming(role: str) -> Iterator[None]:
    """Put the role's name before the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"role {role!r}: {error}") from error


def _algorithm(flight: Preflight) -> None:
    spec, epochs = flight.plugins.algorithm(flight.config.algorithm), flight.config.trainer.epochs

    def check(config: Config) -> None:
        if epochs is not None:  # until the data is read nobody knows how many steps they are
            config = config.with_values({"trainer.total_steps": sys.maxsize})
        if flight.algorithm.compares_samples and flight.purpose != "evaluate":
            config.rollout.require_drawn("a prompt's responses")
        flight.algorithm.check(config)

    flight.plugins.call(spec, "check", check, flight.config)
    for name, own in flight.own_configs.items():
        if flight.roles[name].generates and own.rollout != flight.config.rollout:
            with _naming(name):
                flight.plugins.call(spec, "check", check, replace(flight.config, rollout=own.rollout))


def _learning_rates(flight: Preflight) -> None:
    for name, role in flight.roles.items():
        if role.trains and role_config(flight.config, name, role).engine.lr == 0:
            raise ConfigError(
                f"the learning rate of role {name!r} is 0, so it would never learn; set above 0 what it is read from: "
                f"roles.{name}.lr, else the algorithm's own key, else engine.lr"
            )


def _saved_algorithm(flight: Preflight) -> None:
    if flight.config.algorithm:
        _algorithm(flight)


def _eval_sets(flight: Preflight) -> None:
    config = flight.config
    if not config.eval.held_out and not config.eval.sets:
        raise ConfigError(
            "eval.held_out=false leaves nothing to evaluate on; add eval.sets, or set trainer.eval_every=0 instead"
        )
    for name in config.eval.sets:
        with naming(f"eval.sets.{name}"):
            own = Preflight(set_config(config, name), flight.plugins, flight.purpose)
            for check in (_reward, _data, _rollout, _trainer):
                check(own)
    evaluates = flight.purpose == "evaluate" or config.trainer.eval_every
    if config.eval.sets and evaluates and not flight.roles.get("actor", Role()).generates:
        raise ConfigError(
            f"eval.sets samples from the role `actor`, which does not generate with algo={config.algorithm}; drop it, "
            "and evaluate the model of a checkpoint with it: rlcore eval RUN/checkpoints/step_NUMBER/actor/model"
        )


def _evaluation(flight: Preflight) -> None:
    generates = [name for name, role in flight.roles.items() if role.generates]
    if flight.config.trainer.eval_every and "actor" not in generates and not flight.algorithm.evaluates:
        raise ConfigError(
            f"an evaluation samples from the role `actor`, but algo={flight.config.algorithm} lets "
            f"{', '.join(generates) or 'no role'} generate and has no evaluate() of its own; set trainer.eval_every=0"
        )
    # The rewards are read later, when a run starts.
    names = [OWN, *flight.config.data.mix, *flight.config.eval.sets]
    check_goals(flight.config, flight.algorithm, dict.fromkeys(names, True))


def _roles(flight: Preflight) -> None:
    check_roles(flight.roles, flight.config, flight.plugins)


def _placement(flight: Preflight) -> None:
    if flight.config.cluster.pools != "auto":
        _ = flight.placement  # raises for pools that cannot be made


def _plugins(flight: Preflight) -> None:
    flight.plugins.check_config(flight.config)


@dataclass(frozen=True)
class Check:
    """A check and its purposes. A plan for another machine skips the checks of this one."""

    function: Callable[[Preflight], None]
    purposes: tuple[Purpose, ...] = ALWAYS


CHECKS = (
    Check(_names),
    Check(_reward),
    Check(_date),
    Check(_data),
    Check(_mix),
    Check(_rollout),
    Check(_engines),
    Check(_trainer),
    Check(_cluster, ("train", "evaluate")),
    Check(_sections, ("train", "evaluate")),
    Check(_environment),
    Check(_engine_specs, ("train", "evaluate")),
    Check(_role_settings),
    Check(_role_engine_specs, ("train", "evaluate")),
    Check(_algorithm, ("train", "plan")),
    Check(_curriculum, ("train",)),
    Check(_learning_rates, ("train", "plan")),
    Check(_saved_algorithm, ("evaluate",)),
    Check(_eval_sets),
    Check(_evaluation, ("train",)),
    Check(_roles, ("train",)),
    Check(_placement, ("train",)),
    Check(_plugins, ("train", "evaluate")),
)
"""All checks in order; later ones rely on the earlier ones."""
