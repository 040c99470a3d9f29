"""Checks of an algorithm's roles, before anything starts: names, kinds, leaders and model folders."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from rlcore.adapter_folder import AdapterFolder
from rlcore.config import Config, LoraConfig, RoleConfig
from rlcore.data.chat import check_role_folder, load_any_tokenizer
from rlcore.data.template_kwargs import check_template_kwargs
from rlcore.errors import ConfigError
from rlcore.plugins import KINDS, Role, RoleKind
from rlcore.roles.settings import REWARD_MODEL, reads_text, role_config

if TYPE_CHECKING:
    from rlcore.plugins import PluginManager


def check_roles(
    roles: Mapping[str, Role], config: Config, plugins: PluginManager, *, reserved: Collection[str] = ()
) -> None:
    """Raise ConfigError for the first impossible role. Reads model folders, but loads no weights.

    reserved: names that no role may have.
    """
    for name, role in roles.items():
        _check_name(name, reserved)
        _check_kind(name, role)
        _check_learning_rate(name, role)
        _check_head(name, role)
        if role.follows is not None:
            _check_leader(name, role, role.follows, roles)
        _check_engine_holds(name, role, config, plugins)
        _check_adapter(name, role, config, plugins)
    for name, role in roles.items():
        if role.model is not None:
            check_role_folder(_setting_of_folder(name, role, config), role, config.model)
        _check_template_kwargs(name, role, config)


def check_engines(config: Config, plugins: PluginManager) -> None:
    """Raise ConfigError for settings that the engines of this config do not support."""
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


def _check_name(name: str, reserved: Collection[str]) -> None:
    if not name.isidentifier():
        raise ConfigError(f"role name {name!r} is not a Python identifier, so run.{name} cannot be written; rename it")
    if name in reserved:
        raise ConfigError(f"a role cannot be called {name!r}: Run or cluster.pools uses that name; rename the role")


def _check_kind(name: str, role: Role) -> None:
    if not isinstance(role.kind, RoleKind):
        raise ConfigError(
            f"role {name!r} has kind={role.kind!r}; a kind is one of the values {', '.join(map(repr, KINDS))} of "
            "rlcore, as in Role(kind=CRITIC)"
        )
    if role.generates and not role.kind.is_language_model:
        raise ConfigError(f"role {name!r} is a {role.kind} and cannot generate; only a policy does")


def _check_learning_rate(name: str, role: Role) -> None:
    if role.lr is not None and role.lr < 0:
        raise ConfigError(f"role {name!r} has the learning rate {role.lr}; it must be 0 or more")


def _check_head(name: str, role: Role) -> None:
    if not role.kind.is_language_model and role.model is None and not role.may_start_headless:
        raise ConfigError(
            f"role {name!r} is a {role.kind} that neither trains nor follows, so it needs a model folder with a "
            "trained head: Role(model=FOLDER)"
        )


def _check_leader(name: str, role: Role, leader: str, roles: Mapping[str, Role]) -> None:
    if leader not in roles or leader == name or role.trains:
        raise ConfigError(
            f"role {name!r} follows {leader!r}; a role that does not train can follow another one: "
            f"{', '.join(other for other in roles if other != name) or 'none'}"
        )
    other = roles[leader].kind
    if role.kind.head != other.head:
        raise ConfigError(
            f"role {name!r} is a {role.kind} and follows {leader!r}, a {other}: their weights differ. A policy can "
            "follow a policy; a critic or reward model can follow a critic or reward model"
        )


def _check_engine_holds(name: str, role: Role, config: Config, plugins: PluginManager) -> None:
    own = role_config(config, name, role)
    kinds = plugins.train_engines()[own.engine.name].capabilities.kinds
    if role.kind not in kinds:
        raise ConfigError(
            f"role {name!r} is a {role.kind}, which engine={own.engine.name} does not support; it supports a "
            f"{' or a '.join(map(str, kinds))}. Choose another engine for this role: roles.{name}.engine=NAME"
        )


def _check_adapter(name: str, role: Role, config: Config, plugins: PluginManager) -> None:
    given = config.roles.get(name, RoleConfig()).lora
    own = role_config(config, name, role)
    lora = own.model.lora
    if given and not role.trains:
        why = f"follows {role.follows!r}" if role.follows is not None else "does not train"
        raise ConfigError(f"roles.{name}.lora={given}: role {name!r} {why}, so it has no adapter; leave it out")
    if role.trains:
        _check_lora(lora, f"roles.{name}.lora" if given else "model.lora")
    if not (role.trains and lora.is_on):
        return
    if not plugins.train_engines()[own.engine.name].capabilities.adapters:
        able = [engine for engine, spec in plugins.train_engines().items() if spec.capabilities.adapters]
        raise ConfigError(
            f"model.lora: engine={own.engine.name}, which trains the role {name!r}, has no adapters; choose one that "
            f"has: {', '.join(able) or 'none is installed'}; or roles.{name}.lora={{rank: 0}}"
        )
    rank = lora.rank if lora.path is None else AdapterFolder.of(lora.path).rank
    if rank % own.engine.tp:
        raise ConfigError(
            f"model.lora: the adapter's rank {rank} cannot be divided by engine.tp={own.engine.tp}, whose ranks share "
            f"it; take a multiple of {own.engine.tp}"
        )
    if lora.dropout and own.engine.tp > 1:
        raise ConfigError(
            f"model.lora.dropout={lora.dropout} with engine.tp={own.engine.tp}: tensor-parallel ranks would drop "
            "different inputs of one row; set model.lora.dropout=0"
        )


def _check_lora(lora: LoraConfig, where: str) -> None:
    """Raise ConfigError for settings of an adapter, at the key `where`, that do nothing or leave nothing to train."""
    changed = [key for key in ("alpha", "dropout", "targets") if getattr(lora, key) != getattr(LoraConfig(), key)]
    if not lora.is_on and changed:
        raise ConfigError(f"{where}.{changed[0]} is set, but there is no adapter; set {where}.rank, as {where}.rank=16")
    if lora.path is not None:
        adapter = AdapterFolder.of(lora.path)
        own = [key for key in changed if key != "dropout"]
        if lora.rank not in (0, adapter.rank):
            raise ConfigError(
                f"{where}.rank={lora.rank}, but the adapter of {where}.path={lora.path} has rank {adapter.rank}; "
                f"leave out {where}.rank"
            )
        if own:
            raise ConfigError(
                f"{where}.{own[0]} is set, but the adapter of {where}.path={lora.path} has its own; drop it"
            )
    if lora.alpha == 0:
        raise ConfigError(f"{where}.alpha=0 multiplies the adapter by 0; leave it out for 2 * rank")
    if lora.dropout == 1:
        raise ConfigError(f"{where}.dropout=1 drops every input of the adapter; set it below 1")
    if lora.targets == []:
        raise ConfigError(f"{where}.targets=[] adapts no layer; leave it out for all linear layers")


def _check_template_kwargs(name: str, role: Role, config: Config) -> None:
    given = config.roles[name].chat_template_kwargs if name in config.roles else {}
    where = f"roles.{name}.chat_template_kwargs={given}"
    if given and not reads_text(role, config):
        raise ConfigError(
            f"{where}: this role reads the actor's token ids and renders no chats; leave it out, and set "
            "model.chat_template_kwargs for the prompts"
        )
    if given:
        check_template_kwargs(load_any_tokenizer(role_config(config, name, role).model), given, where)


def _setting_of_folder(name: str, role: Role, config: Config) -> str:
    """Return the setting that chose a role's folder, as the beginning of a message."""
    is_reward_model = name == REWARD_MODEL and role.model == config.reward.model
    return "reward.model=" if is_reward_model else f"the model of role {name!r}, "
