"""Composes a Config from overrides and YAML groups, through hydra.

hydra composes plain nodes. The node `schema` holds every default of the dataclasses, plugins' own (`judge`,
`rollout.NAME`) included, and a group's option holds the values that it changes. A YAML file replaces the option of an
installed plugin with the same name.
Nodes made from dataclasses and plugins are in hydra's (global) ConfigStore for one composition only. hydra accepts any
key; `rlcore.config.build` checks keys and types afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlcore.config.build import build_config, defaults
from rlcore.config.devices import AUTO, FindGpus, local_gpus, resolve_auto
from rlcore.config.files import begun_values
from rlcore.config.installed import Installed
from rlcore.config.schema import SECTIONS, Config
from rlcore.errors import ConfigError, did_you_mean
from rlcore.hub import pin_names

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

GROUPS = ("algo", *SECTIONS, "experiment")
"""The config groups: `GROUP=NAME` chooses one of a group's options. A plugin's section is one more."""


def compose(
    overrides: Sequence[str],
    plugins: Installed,
    *,
    base: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    find_gpus: FindGpus = local_gpus,
) -> Config:
    """Compose and build the config of a run from hydra overrides (`data=gsm8k`, `trainer.total_steps=10`).

    base: the plain values of a saved config to start from in place of the defaults; its algorithm stays.
    values: Python values by dotted key, set after the overrides as they would set them, but read as they are. The name
    of a group with a text chooses its option.
    find_gpus: is asked for the GPUs when a value is `auto`; by default those of this machine.
    Without an algorithm, `algorithm` is "" and `algo` None (an evaluation needs none; `check` refuses it for training).
    Names on the hub get their commits. Raises ConfigError for an override that cannot be read, an unknown key or group
    option, and as `resolve_auto`, `build` and `pin_names` do.
    """
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    search_path = [override for override in overrides if override.startswith("hydra.searchpath=")]
    own = {path for path in plugins.sections() if "." not in path}
    values = dict(values or {})
    options = [key for key, value in values.items() if isinstance(value, str) and _is_group(key, own)]
    overrides = [*overrides, *(f"{key}={values.pop(key)}" for key in options)]
    with hydra_nodes(_nodes(plugins, base), search_path) as hydra:
        prepared = _prepare(overrides, own, _options(hydra, search_path))
        try:
            composed = hydra.compose_config(
                config_name="config" if base is None else "saved",
                overrides=prepared,
                run_mode=RunMode.RUN,
                with_log_configuration=False,
            )
            with open_dict(composed):
                del composed["hydra"]
            for key, value in values.items():
                _refuse_algorithm(key, key)
                OmegaConf.update(composed, key, _escape(value), force_add=True)
            composed_values: Any = OmegaConf.to_container(composed, resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"the config cannot be composed: {error}") from error
    algorithm = composed_values["algorithm"]
    if base is not None and base.get("algorithm", algorithm) != algorithm:
        raise ConfigError(
            f"the saved config has algo={base['algorithm']}, which cannot be changed to {algorithm}; to train its "
            f"run's model by another algorithm, leave out the saved config: algo={algorithm} "
            "model.path=RUN/checkpoints/NAME/actor/model"
        )
    config = _build(resolve_auto(composed_values, find_gpus), plugins)
    given = [*(values or {}), *(parse(each).key_or_group for each in overrides)]
    if config.trainer.epochs is not None and "trainer.total_steps" in given:
        raise ConfigError(
            f"trainer.total_steps = {config.trainer.total_steps} and trainer.epochs = {config.trainer.epochs} are both "
            "lengths of the run; leave out one of the two (trainer.epochs=null, where a saved config or an experiment "
            "has it)"
        )
    begun = begun_values(Path(config.run.dir).expanduser()) if config.run.dir is not None else {}
    return pin_names(config, begun)


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, as hydra's basic sweeper makes them (`a=1,2 b=range(0,3)`).

    Raises ConfigError for an override that cannot be read, and for another sweeper or launcher.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    parsed = [parse(override) for override in overrides]
    for override in parsed:
        if override.key_or_group in ("hydra/sweeper", "hydra/launcher"):
            raise ConfigError(f"{override.input_line!r}: sweeps run with hydra's basic sweeper and launcher only")
    try:
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise ConfigError(f"the sweep cannot be read: {error}") from error
    return jobs


def parse(override: str) -> Any:
    """Parse one override into hydra's Override; raises ConfigError with how to write it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except OverrideParseException as error:
        raise ConfigError(
            f"cannot read {override!r}: {str(error).splitlines()[0]}. Write KEY=VALUE or GROUP=NAME; quote a value "
            "with special characters twice, as in 'data.system_prompt=\"Hello, you\"'"
        ) from error
    return parsed


@contextmanager
def hydra_nodes(nodes: Mapping[tuple[str | None, str], Any], search_path: Sequence[str] = ()) -> Iterator[Hydra]:
    """Yield a hydra with configs/ and `nodes` ((group, name) -> plain values); remove the nodes afterwards.

    A node with the name of a file is left out: hydra would take the node for the file's schema.
    """
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("rlcore.configs", version_base="1.3", job_name="rlcore"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        # hydra has added its own nodes by now, so only the nodes added below have to be removed again.
        store = ConfigStore.instance()
        before = store.repo
        options_of = _options(hydra, search_path)
        files = {group: options_of(group) for group in {group for group, _ in nodes} if group}
        store.repo = {key: dict(value) if isinstance(value, dict) else value for key, value in before.items()}
        try:
            for (group, name), node in nodes.items():
                if group is None or name not in files[group]:
                    package = "_global_" if group == "algo" else None
                    store.store(name=name, node=node, group=group, package=package, provider="rlcore")
            yield hydra
        finally:
            store.repo = before


def _options(hydra: Hydra, search_path: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that lists a group's options; hydra's `get_group_options` copies all nodes for each group."""
    from hydra.core.object_type import ObjectType

    config_name = "config" if search_path else None
    _, repository = hydra.config_loader._parse_overrides_and_create_caching_repo(config_name, list(search_path))
    return lambda group: repository.get_group_options(group, ObjectType.CONFIG)


def core_values() -> dict[str, dict[str, Any]]:
    """Return the default of each core key, as plain values: the dataclass's, or the one in configs/config.yaml."""
    shipped = yaml.safe_load(files("rlcore.configs").joinpath("config.yaml").read_text(encoding="utf-8"))
    return {name: {**defaults(cls), **_autos(cls), **shipped.get(name, {})} for name, cls in SECTIONS.items()}


def sections_with_defaults(config: Config) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the dotted path, the object and the default values of each section of a config."""
    for name, standard in core_values().items():
        yield name, getattr(config, name), standard
    for path, section in {**config.sections, "algo": config.algo}.items():
        yield path, section, defaults(type(section))


def _autos(cls: type) -> dict[str, str]:
    """Return the keys of a dataclass that are `auto` until a config is composed."""
    return {field.name: AUTO for field in dataclasses.fields(cls) if field.metadata.get("auto")}


def schema_node(sections: Mapping[str, type]) -> dict[tuple[str | None, str], Any]:
    """Return the node made from the dataclasses: every key with its default.

    sections: the dataclasses that plugins bring, by dotted name.
    """
    values: dict[str, Any] = {"algorithm": "", "algo": {}, "roles": {}, **core_values()}
    for path, cls in sections.items():
        top, _, name = path.partition(".")
        if name:
            values[top][name] = defaults(cls)
        else:
            values[top] = defaults(cls)
    return {(None, "schema"): values}


def _nodes(plugins: Installed, base: Mapping[str, Any] | None) -> dict[tuple[str | None, str], Any]:
    nodes = schema_node(plugins.sections())
    for name, spec in plugins.algorithms().items():
        nodes["algo", name] = {"algorithm": name, "algo": defaults(spec.algorithm.config_class)}
    nodes |= {key: values for key, values in plugins.options().items() if key[0] != "algo"}
    if base is not None:
        choices = [{group: None} for group in GROUPS]
        nodes[None, "saved"] = {"defaults": ["schema", "_self_", *choices], **_escape(base)}
    return nodes


def _prepare(overrides: Sequence[str], own: Set[str], options_of: Callable[[str], list[str]]) -> list[str]:
    """Check each override's form and group option. A value override passes with any key; `build` checks keys.

    own: the groups of plugins' sections, which the defaults list of configs/config.yaml lacks.
    """
    prepared = []
    for override in overrides:
        parsed = parse(override)
        key = parsed.key_or_group
        is_group = _is_group(key, own)
        if parsed.is_sweep_override():
            raise ConfigError(
                f"{override!r} gives several values: add --multirun to sweep over them, write {key}=[a,b] for a list, "
                f"or quote text that holds a comma: '{key}=\"a,b\"'"
            )
        _refuse_algorithm(key, override)
        if is_group and isinstance(parsed.value(), str) and not key.startswith("hydra/"):
            options = options_of(key)
            if parsed.value() not in options:
                raise ConfigError(_unknown_option(key, parsed.value(), options))
        # `++` sets a key whether or not a node has it: unknown keys must reach `build`, whose error names the nearest.
        as_given = is_group or override.startswith(("hydra.", "+", "~"))
        # `+` adds a group to the defaults list.
        if key in own and override.startswith(key) and isinstance(parsed.value(), str):
            prepared.append(f"+{override}")
        else:
            prepared.append(override if as_given else f"++{override}")
    return prepared


def _is_group(key: str, own: Set[str]) -> bool:
    return key in GROUPS or key in own or "/" in key


def _refuse_algorithm(key: str, given: str) -> None:
    if key == "algorithm":
        raise ConfigError(f"{given!r}: choose the algorithm with algo=NAME")


def _build(values: dict[str, Any], plugins: Installed) -> Config:
    name = values.get("algorithm") or ""
    if not name:
        return build_config({**values, "algorithm": ""}, None, plugins)
    spec = plugins.algorithms().get(name)
    if spec is None:
        raise ConfigError(_unknown_option("algo", name, list(plugins.algorithms())))
    return build_config(values, spec.algorithm.config_class, plugins)


def _unknown_option(group: str, choice: str, options: Sequence[str]) -> str:
    own, path = choice.rpartition("/")[2], choice if "/" in choice or "." in choice else "FILE"
    data = own if own in options else "file"  # `openai/gsm8k` is data=gsm8k with a path
    remedies = {
        "algo": ". Install its plugin, or give its file with -p FILE.py",
        "data": f". A file, or a name on the hub: data={data} data.path={path}",
        "model": f". A folder or a name on the hub is a value of model.path: model.path={choice}",
    }
    listed = ", ".join(options) or "none"
    return f"{group}={choice} is unknown.{did_you_mean(choice, options)} Available: {listed}{remedies.get(group, '')}"


def _escape(value: Any) -> Any:
    """Return values for omegaconf, which must not read `${` in them; a tuple becomes a list, a path text."""
    if isinstance(value, Mapping):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escape(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.replace("${", "\\${") if isinstance(value, str) else value
