"""Combinations of values that cannot work together, found before anything starts."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from rlcore.config.schema import Config
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


def check(config: Config, plugins: PluginManager, *, training: bool = True) -> None:
    """Raise ConfigError where the config cannot work with itself or with what is installed.

    Asks, in this order, rlcore's own rules, the `check` of the engines and of plugins' config sections, the algorithm's
    `check`, and the plugins' rlcore_check_config.
    training: False for an evaluation, which needs no algorithm.
    """
    plugins.check_names(config)
    _check_reward(config, plugins)
    _check_rollout(config)
    check_engines(config, plugins)
    _check_trainer(config)
    _check_cluster(config)
    if training and not config.algorithm:
        raise ConfigError(
            f"no algorithm is chosen: add algo=NAME, one of {', '.join(plugins.algorithms()) or '(none)'}"
        )
    used = (plugins.rollout_engines()[config.rollout.name], plugins.train_engines()[config.engine.name])
    for check_own in [spec.check for spec in used] + [spec.check for spec in plugins.configs().values()]:
        if check_own is not None:
            check_own(config)
    if config.algorithm:
        plugins.algorithms()[config.algorithm].algorithm(config.algo).check(config)
    plugins.check_config(config)


def _check_reward(config: Config, plugins: PluginManager) -> None:
    reward = config.reward
    if reward.path is not None and reward.functions:
        raise ConfigError(
            f"reward.path = {reward.path!r} is used alone; leave out reward.functions, or name the file there: "
            f"'reward.functions={{{reward.path.replace(':', chr(92) + ':')}: 1.0}}'"
        )
    if reward.path is not None:
        _check_function(f"reward.path = {reward.path!r}", reward.path)
    for name in reward.functions:
        if ":" in name:
            _check_function(f"reward.functions: {name!r}", name)
    if reward.functions and not any(reward.functions.values()) and reward.model is None:
        raise ConfigError("reward.functions has only weights of 0, so every reward is 0; give one another weight")


def _check_function(what: str, reference: str) -> None:
    file, _, function = reference.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"{what} must be FILE.py:FUNCTION, as in my.py:score")


def _check_rollout(config: Config) -> None:
    rollout = config.rollout
    if rollout.min_tokens > rollout.response_len:
        raise ConfigError(
            f"rollout.min_tokens = {rollout.min_tokens} is more than rollout.response_len = {rollout.response_len}"
        )
    if rollout.top_p == 0:
        raise ConfigError("rollout.top_p = 0 leaves no token; 1 samples from all, rollout.temperature=0 is greedy")
    if "" in rollout.stop:
        raise ConfigError("rollout.stop holds an empty text, which would end every response at once; remove it")


def check_engines(config: Config, plugins: PluginManager) -> None:
    """Raise ConfigError for settings of the engines that they cannot run with; for a role with its own settings too."""
    betas = config.engine.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"engine.betas = {betas} must be two numbers from 0 to below 1, as in [0.9, 0.999]")
    rollout = plugins.rollout_engines()
    if config.rollout.tp > 1 and not rollout[config.rollout.name].capabilities.tensor_shards:
        able = [name for name, spec in rollout.items() if spec.capabilities.tensor_shards]
        raise ConfigError(
            f"rollout.tp={config.rollout.tp}: rollout={config.rollout.name} cannot shard a model over tensor-parallel "
            f"ranks; set rollout.tp=1, or choose one that can: {', '.join(able) or 'none is installed'}"
        )
    train = plugins.train_engines()[config.engine.name]
    if config.engine.offload and not train.capabilities.offload:
        raise ConfigError(
            f"engine.offload=true: engine={train.name} cannot move its weights off the GPU; set engine.offload=false"
        )


def _check_trainer(config: Config) -> None:
    trainer = config.trainer
    if trainer.eval_samples > 1 and trainer.eval_temperature == 0:
        raise ConfigError(
            f"trainer.eval_samples = {trainer.eval_samples} greedy responses to one prompt are all equal: set "
            "trainer.eval_temperature above 0, or trainer.eval_samples=1"
        )
    weighs = trainer.importance not in ("auto", "off") or (trainer.importance == "auto" and trainer.rollouts_ahead)
    if weighs and trainer.importance_cap == 0:
        raise ConfigError(
            f"trainer.importance_cap = 0 gives every sample the weight 0, so with trainer.importance = "
            f"{trainer.importance} nothing would be learned; set it above 0, as 2.0"
        )
    if trainer.importance == "mask" and not trainer.importance_floor < 1 < trainer.importance_cap:
        raise ConfigError(
            f"trainer.importance = mask keeps tokens whose ratio is from trainer.importance_floor = "
            f"{trainer.importance_floor} to trainer.importance_cap = {trainer.importance_cap}, a band that must have 1 "
            "inside it: equal policies have that ratio. Use 0.5 and 2.0"
        )


def _check_cluster(config: Config) -> None:
    cluster = config.cluster
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
    gpus = cluster.gpus_per_worker
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"cluster.gpus_per_worker = {gpus} must be a whole number or a share below 1")
