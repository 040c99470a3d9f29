"""`rlcore COMMAND ...`: the one reader of argv.

Heavy imports stand in the command that needs them: `rlcore --help` imports no plugin, no hydra and no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.collector import pause_collector, resume_collector
from rlcore.errors import ConfigError, PluginError, RLCoreError, did_you_mean

if TYPE_CHECKING:
    from rlcore.config import Config
    from rlcore.plugins import PluginManager


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0: done. 2: the command line, the config or a plugin is wrong. 1: another error that rlcore names. 130: interrupted,
    also by a first Ctrl-C or SIGTERM, which leaves a checkpoint.
    Errors that rlcore does not name pass through with their traceback.
    """
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except RLCoreError as error:
        print(f"rlcore: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, PluginError)) else 1
    except KeyboardInterrupt:
        print("rlcore: interrupted", file=sys.stderr)
        return 130
    finally:
        resume_collector()
        gc.unfreeze()


def _dispatch(argv: list[str]) -> int:
    if any(argument in ("-sc", "--shell-completion", "--shell_completion") for argument in argv):
        return _complete(argv)
    end = 0
    while end < len(argv) and argv[end].startswith("-"):
        end += 2 if argv[end] in ("-p", "--plugin") else 1
    parser = argparse.ArgumentParser(prog="rlcore", add_help=False, allow_abbrev=False)
    _add_plugin_options(parser)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    options = parser.parse_args(argv[:end])
    command, *rest = argv[end:] or [""]
    if options.version:
        from importlib.metadata import version

        print(f"rlcore {version('rlcore')}")
        return 0
    if options.help or command in ("", "help"):
        _show(_help())
        return 0 if options.help or command else 2
    if command in _COMMANDS:
        return _COMMANDS[command][1](argv[:end] + rest)
    return _plugin_command(command, rest, options)


def _plugin_command(name: str, argv: list[str], options: argparse.Namespace) -> int:
    commands = _load(options).commands()
    if name not in commands:
        names = [*_COMMANDS, *commands]
        raise ConfigError(
            f"unknown command {name!r}.{did_you_mean(name, names)} Commands: {', '.join(names)}. A plugin may bring "
            f"another: pip install rlcore-plugin-{name}"
        )
    return commands[name].main(argv)


def _train(argv: list[str]) -> int:
    parser = _config_parser("train")
    parser.add_argument("--cfg", choices=["job"], help="print the composed config and leave")
    parser.add_argument("-m", "--multirun", action="store_true", help="run each combination of the given values")
    options = parser.parse_intermixed_args(argv)
    if options.help:
        return _show_keys("train", parser, options)
    pause_collector()  # until all is imported
    plugins = _load(options)
    if options.multirun:
        if options.cfg:
            raise ConfigError("--cfg and --multirun exclude each other; leave one out")
        return _multirun(options, plugins)
    _require_plugins(options, plugins)
    config = _compose(options, options.overrides, plugins)
    if options.cfg:
        return _print_config(config)
    return _train_one(config, plugins)


def _require_plugins(options: argparse.Namespace, plugins: PluginManager) -> None:
    """Check the plugins of the run that is to go on or to be repeated, as its config may not compose without them."""
    from rlcore.folder import require_plugins

    folders = [word.removeprefix("run.dir=").strip("'\"") for word in options.overrides if word.startswith("run.dir=")]
    if options.config:
        folders.append(str(Path(options.config).parent))
    for folder in folders:
        require_plugins(Path(folder).expanduser(), plugins)


def _train_one(config: Config, plugins: PluginManager) -> int:
    if config.cluster.pools == "auto":
        config = plugins.place_roles(config)
    from rlcore.trainer import train

    try:
        return 130 if train(config, plugins)["status"] == "interrupted" else 0
    finally:
        gc.unfreeze()  # the models of one job of a sweep are not there for the next one


def _multirun(options: argparse.Namespace, plugins: PluginManager) -> int:
    """Compose and check all jobs of a sweep, then run them in turn, each in its own run folder."""
    from rlcore.config import check
    from rlcore.config.compose import sweep

    stem = time.strftime("multirun/%Y-%m-%d_%H-%M-%S")
    jobs = sweep(options.overrides)
    configs = []
    for number, job in enumerate(jobs):
        config = _compose(options, job, plugins)
        run = dataclasses.replace(config.run, dir=f"{config.run.dir or stem}/{number}")
        configs.append(dataclasses.replace(config, run=run))
        check(configs[-1], plugins)
    for number, (job, config) in enumerate(zip(jobs, configs, strict=True)):
        print(f"job {number + 1} of {len(jobs)}: {' '.join(job)} -> {config.run.dir}", flush=True)
        if status := _train_one(config, plugins):
            return status
    return 0


def _eval(argv: list[str]) -> int:
    parser = _config_parser("eval")
    options = parser.parse_intermixed_args(argv)
    if options.help:
        return _show_keys("eval RUN_OR_MODEL", parser, options)
    if not options.overrides or "=" in options.overrides[0]:
        raise ConfigError("say what to evaluate first: rlcore eval RUN_OR_MODEL [OVERRIDE ...]")
    target, overrides = options.overrides[0], options.overrides[1:]
    plugins = _load(options)
    from rlcore.folder import require_plugins

    require_plugins(Path(target), plugins)
    base = _eval_base(target)
    if options.config:
        from rlcore.config.files import read_values

        base = {**read_values(Path(options.config)), **base}
    config = _compose(options, overrides, plugins, base=base)
    from rlcore.config import check

    check(config, plugins, training=False)
    from rlcore.evaluate import evaluate

    evaluate(Path(target), config, plugins)
    return 0


def _eval_base(target: str) -> dict[str, Any]:
    """Return the saved config of a run folder, or for a model folder a config with that model."""
    from rlcore.config.files import read_values

    folder = Path(target)
    if (folder / "config.yaml").is_file():
        return read_values(folder / "config.yaml")
    if (folder / "config.json").is_file() or target == "tiny":
        return {"model": {"path": target}}
    if folder.is_dir():
        raise ConfigError(f"{target!r} holds neither config.yaml (a run) nor config.json (a Hugging Face model)")
    raise ConfigError(
        f"{target!r} does not exist: it must be a folder with config.yaml (a run) or config.json (a Hugging Face model)"
    )


def _plugins(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rlcore plugins", allow_abbrev=False, description=_COMMANDS["plugins"][0])
    _add_plugin_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for test: what NAME needs set")
    parser.add_argument("words", nargs="*", metavar="test NAME", help="run the conformance suite over a plugin")
    options = parser.parse_intermixed_args(argv)
    if options.words:
        return _test_plugin(options)
    rows = [dataclasses.asdict(info) for info in _load(options).list()]
    if options.json:
        _show(json.dumps(rows, indent=2))
        return 0
    lines = []
    for row in rows:
        origin = f"{row['distribution']} {row['version']}" if row["distribution"] else f"sha256 {row['sha256']}"
        lines.append(f"{row['name']}  [{row['kind']}, {row['state']}]  {origin}")
        lines += [f"    file   {row['file'] or 'not loaded'}", f"    hooks  {', '.join(row['hooks']) or 'none'}"]
    _show("\n".join(lines))
    return 0


def _test_plugin(options: argparse.Namespace) -> int:
    """Print a plugin's report card; 1 when a check fails."""
    if options.words[0] != "test" or len(options.words) != 2:
        raise ConfigError("usage: rlcore plugins test NAME")
    from tempfile import TemporaryDirectory

    from rlcore.testing.suites import open_suite

    name = options.words[1]
    with (
        TemporaryDirectory(prefix="rlcore-test-") as folder,
        open_suite(name, Path(folder), settings=options.set, plugins=options.plugin) as suite,
    ):
        results = []
        for result in suite.results():
            results.append(result)
            if not options.json:
                _show(str(result))
    failed = sum(result.outcome == "FAIL" for result in results)
    if options.json:
        _show(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        counts = {word: sum(r.outcome == word for r in results) for word in ("pass", "FAIL", "n/a")}
        seconds = sum(result.seconds for result in results)
        _show(f"{name}: {', '.join(f'{count} {word}' for word, count in counts.items())}, in {seconds:.0f} s")
    return 1 if failed else 0


def _new_plugin(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlcore new-plugin", allow_abbrev=False, description=_COMMANDS["new-plugin"][0]
    )
    parser.add_argument("name", metavar="NAME", help="the algorithm's name, such as my-algo: then algo=my_algo")
    parser.add_argument("--dir", default=".", help="where to write the folder rlcore-plugin-NAME; here if not given")
    options = parser.parse_args(argv)
    from rlcore.plugins.new import new_plugin

    folder, *files = new_plugin(options.name, Path(options.dir))
    name = files[0].stem.removeprefix("rlcore_plugin_")
    lines = [f"wrote {folder}:", *(f"  {file.relative_to(folder)}" for file in files), "next:"]
    lines += [f"  pip install -e {folder}", f"  rlcore plugins test {name}", f"  rlcore train algo={name}"]
    _show("\n".join(lines))
    return 0


def _config(argv: list[str]) -> int:
    parser = _config_parser("config")
    parser.add_argument("--keys", action="store_true", help="show all keys with type, default and meaning")
    options = parser.parse_intermixed_args(argv)
    if options.help or options.keys:
        return _show_keys("config", parser, options)
    plugins = _load(options)
    config = _compose(options, options.overrides, plugins)
    from rlcore.config import check

    check(config, plugins)
    if config.algorithm and config.cluster.pools != "auto":
        from rlcore.roles.placement import plan
        from rlcore.roles.settings import resolve_roles

        roles = plugins.algorithm(config.algorithm).algorithm(config.algo).roles()
        plan(config, resolve_roles(roles, config), plugins.train_engines()[config.engine.name])
    return _print_config(config)


def _print_config(config: Config) -> int:
    from rlcore.config import to_yaml

    _show(to_yaml(config).rstrip("\n"))
    return 0


def _show(text: str) -> None:
    """Print to stdout; a reader that has seen enough (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _compose(
    options: argparse.Namespace, overrides: list[str], plugins: PluginManager, base: dict[str, Any] | None = None
) -> Config:
    from rlcore.config import compose
    from rlcore.config.files import read_values

    if base is None and options.config:
        base = read_values(Path(options.config))
    if options.config_dir:
        folder = Path(options.config_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {options.config_dir} is not a folder")
        overrides = [*overrides, f"hydra.searchpath=['file://{folder}']"]
    return compose(overrides, plugins, base=base)


def _load(options: argparse.Namespace) -> PluginManager:
    from rlcore.plugins import PluginManager

    return PluginManager.load(options.plugin, trace=options.trace_hooks)


def _add_plugin_options(parser: argparse.ArgumentParser) -> None:
    what = "FILE.py loads a local plugin, no:NAME leaves one out; may be repeated"
    parser.add_argument("-p", "--plugin", action="append", default=[], metavar="FILE|no:NAME", help=what)
    parser.add_argument("--trace-hooks", action="store_true", help="print each hook call and its time to stderr")


def _config_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"rlcore {command}", add_help=False, allow_abbrev=False)
    _add_plugin_options(parser)
    parser.add_argument("-h", "--help", action="store_true", help="show this, and with algo=NAME the algorithm's keys")
    parser.add_argument("--config", metavar="FILE", help="start from a saved config, as RUN/config.yaml")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with config groups of your own")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="GROUP=OPTION or GROUP.KEY=VALUE")
    return parser


def _show_keys(usage: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Show options, groups and keys; a chosen algorithm's plugin is loaded, otherwise no plugin is imported."""
    from rlcore.config.compose import SECTIONS
    from rlcore.config.reference import text

    name = next((word.removeprefix("algo=") for word in options.overrides if word.startswith("algo=")), None)
    sections: dict[str, type] = {}
    if name is not None:
        plugins = _load(options)
        sections["algo"] = plugins.algorithm(name).algorithm.config_class
        sections |= plugins.sections()
    lines = [f"usage: rlcore {usage} [OPTION ...] [OVERRIDE ...]\n", parser.format_help().partition("\n\n")[2]]
    lines.append(f"{_groups()}\n")
    if name is None:
        lines.append(
            "algo, engine.NAME, rollout.NAME: the keys of the algorithm, the engines and other plugins, shown by "
            f"rlcore {usage} algo=NAME --help"
        )
    _show("\n".join([*lines, text({**sections, **SECTIONS})]))
    return 0


def _help() -> str:
    from rlcore.plugins import installed

    names = [entry.name for entry in installed()]
    commands = {name: summary for name, (summary, _) in _COMMANDS.items()}
    for entry in installed():
        if entry.name.startswith("command."):
            commands[entry.name.removeprefix("command.")] = f"from {entry.dist.name if entry.dist else entry.module}"
    lines = [
        "usage: rlcore COMMAND [OPTION ...] [OVERRIDE ...]",
        "",
        *(f"  {name:<10} {summary}" for name, summary in commands.items()),
        "",
        f"algorithms: {', '.join(name for name in names if '.' not in name) or 'none installed'}",
        "",
        _groups(),
        "",
        "rlcore train algo=NAME --help     options, and all keys with the algorithm's",
        "rlcore train experiment=quickstart",
        'rlcore -sc install=bash           shell completion (also zsh, fish): eval "$(rlcore -sc install=bash)"',
    ]
    return "\n".join(lines)


def _groups() -> str:
    from rlcore.config.reference import group_options

    lines = [f"  {group:<10} {', '.join(options)}" for group, options in group_options().items()]
    return "\n".join(["groups (GROUP=OPTION; an installed plugin's name is an option too):", *lines])


def _complete(argv: list[str]) -> int:
    """Hand shell completion to hydra, with the installed algorithms' names from metadata.

    Of plugins only the modules of rlcore's own engines are imported, for their config keys.
    """
    from rlcore.config.compose import hydra_nodes, schema_node
    from rlcore.plugins import installed, own_engines

    arguments = [argument for argument in argv if "=" in argument]
    if any(argument.startswith("query=") for argument in arguments):
        line = os.environ.get("COMP_LINE", "")
        words = line.split()
        if len(words) < 2 or (len(words) == 2 and not line[-1].isspace()):
            prefix = words[1] if len(words) == 2 else ""
            of_plugins = [entry.name.partition(".")[2] for entry in installed() if entry.name.startswith("command.")]
            print(" ".join(name for name in [*_COMMANDS, *of_plugins] if name.startswith(prefix)))
            return 0
        # hydra completes a program without subcommands: leave out ours, and an evaluation's target.
        skipped = 3 if words[1] == "eval" else 2
        os.environ["COMP_LINE"] = " ".join([words[0], *words[skipped:]]) + (" " if line[-1].isspace() else "")
    nodes = schema_node(own_engines().sections())
    nodes |= {("algo", entry.name): {"algorithm": entry.name} for entry in installed() if "." not in entry.name}
    with hydra_nodes(nodes) as hydra:
        hydra.shell_completion(config_name="config", overrides=arguments)
    return 0


_COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "train": ("train a model: rlcore train algo=NAME [OVERRIDE ...]", _train),
    "eval": ("measure a run or a model on held-out prompts: rlcore eval RUN_OR_MODEL [OVERRIDE ...]", _eval),
    "plugins": ("list the installed plugins and where they come from; test NAME: check one", _plugins),
    "new-plugin": ("write a new algorithm's distribution: rlcore new-plugin NAME [--dir DIR]", _new_plugin),
    "config": ("compose, check and print a config: rlcore config algo=NAME [OVERRIDE ...]", _config),
}


if __name__ == "__main__":
    sys.exit(main())
