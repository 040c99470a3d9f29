"""`rlcore COMMAND ...`: the one reader of argv.

Commands are plugins, found by the entry points command.NAME, so that only the module of the given command is imported.
`rlcore --help` imports none, nor hydra or torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from rlcore.collector import resume_collector
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine
from rlcore.errors import ConfigError, PluginError, RLCoreError, did_you_mean
from rlcore.exits import exits_are_errors, is_late_exit
from rlcore.stacks import register_stacks

if TYPE_CHECKING:
    from rlcore.plugins import CommandSpec


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0: done. 2: the command line, the config or a plugin is wrong. 1: another error that rlcore names. 130: interrupted,
    also by a first Ctrl-C or SIGTERM, which leaves a checkpoint.
    An exit in code of others is an error: 2 at the start, 1 later. Only a command with `CommandSpec.main` may exit.
    Errors that rlcore does not name pass through with their traceback.
    """
    register_stacks()
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except RLCoreError as error:
        print(f"rlcore: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, PluginError)) and not is_late_exit(error) else 1
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
    words = argv[end:]
    if options.version:
        from importlib.metadata import version

        print(f"rlcore {version('rlcore')}")
        return 0
    if options.help or not words or words[0] in ("", "help"):
        CommandLine.show(_help())
        return 0 if options.help or words[:1] == ["help"] else 2
    with exits_are_errors():
        spec = _find(words, options)
    return _run(spec, argv[:end], words[len(spec.name.split()) :])


def _find(words: Sequence[str], options: argparse.Namespace) -> CommandSpec:
    """Return the command that the words begin with: from its module alone, or from all plugins loaded.

    Raises PluginError where its plugin is broken, ConfigError for an unknown name.
    """
    from rlcore.plugins import PluginManager
    from rlcore.plugins.import_limit import import_timeout

    import_timeout()  # a wrong one is the fault of no plugin
    entries = _commands()
    name = _longest(words, entries)
    if name is not None and f"no:{entries[name].name}" not in options.plugin:
        return PluginManager.load_only([entries[name]]).commands()[name]
    known = PluginManager.load(options.plugin, trace=options.trace_hooks).commands()
    name = _longest(words, known)
    if name is None:
        raise ConfigError(
            f"unknown command {words[0]!r}.{did_you_mean(words[0], known)} Commands: {', '.join(known)}. A plugin may "
            f"bring another: pip install rlcore-plugin-{words[0]}"
        )
    return known[name]


def _longest(words: Sequence[str], names: Iterable[str]) -> str | None:
    """Return the longest of the names that these words begin with: `plugins test` before `plugins`."""
    fitting = [name for name in names if list(words[: len(name.split())]) == name.split()]
    return max(fitting, key=len, default=None)


def _commands() -> dict[str, EntryPoint]:
    """Return the entry points of the installed commands by name, those of SUMMARIES first."""
    from rlcore.plugins import command_of, installed

    found: dict[str, EntryPoint] = {}
    for entry in installed():
        if (name := command_of(entry.name)) is not None:
            found.setdefault(name, entry)  # rlcore's own come first; `load` refuses another of the same name
    return {name: found[name] for name in (*(own for own in SUMMARIES if own in found), *found)}


def _run(spec: CommandSpec, before: list[str], rest: list[str]) -> int:
    """Run a command on the words behind its name; the options before its name are rlcore's."""
    if spec.main is not None:
        return spec.main(rest)
    assert spec.run is not None
    parser = argparse.ArgumentParser(prog=f"rlcore {spec.name}", add_help=False, allow_abbrev=False)
    _add_plugin_options(parser)
    parser.add_argument("-h", "--help", action="store_true", help="show this, and with algo=NAME the algorithm's keys")
    if spec.config:
        parser.add_argument("--config", metavar="FILE", help="start from a saved config, as RUN/config.yaml")
        parser.add_argument("--config-dir", metavar="DIR", help="a folder with config groups of your own")
    if spec.options is not None:
        with exits_are_errors():
            spec.options(parser)
    if spec.config:
        parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="GROUP=OPTION or GROUP.KEY=VALUE")
    line = CommandLine(parser.parse_intermixed_args([*before, *rest]))
    with exits_are_errors():
        if not line.options.help:
            return spec.run(line)
        text = _keys(spec, parser, line) if spec.config else f"{spec.summary}\n\n{parser.format_help()}"
    CommandLine.show(text)
    return 0


def _add_plugin_options(parser: argparse.ArgumentParser) -> None:
    plugin_help = "FILE.py loads a local plugin, no:NAME leaves one out; may be repeated"
    parser.add_argument("-p", "--plugin", action="append", default=[], metavar="FILE|no:NAME", help=plugin_help)
    parser.add_argument("--trace-hooks", action="store_true", help="print each hook call and its time to stderr")


def _keys(spec: CommandSpec, parser: argparse.ArgumentParser, line: CommandLine) -> str:
    """Return options, groups and keys; a chosen algorithm's plugin is loaded, otherwise no plugin is imported."""
    from rlcore.config.reference import CORE_SECTIONS, text

    name = next((word.removeprefix("algo=") for word in line.overrides if word.startswith("algo=")), None)
    sections: dict[str, type] = {}
    if name is not None:
        sections["algo"] = line.plugins.algorithm(name).algorithm.config_class
        sections |= line.plugins.sections()
    usage = f"rlcore {spec.name} {spec.usage}".rstrip()
    lines = [f"usage: {usage} [OPTION ...] [OVERRIDE ...]\n", parser.format_help().partition("\n\n")[2]]
    lines.append(f"{_groups()}\n")
    if name is None:
        lines.append(
            "algo, engine.NAME, rollout.NAME: the keys of the algorithm, the engines and other plugins, shown by "
            f"{usage} algo=NAME --help"
        )
    return "\n".join([*lines, text({**sections, **CORE_SECTIONS})])


def _help() -> str:
    from rlcore.plugins import distribution_of, installed

    commands = {name: SUMMARIES.get(name, f"from {distribution_of(entry)[0]}") for name, entry in _commands().items()}
    algorithms = [entry.name for entry in installed() if "." not in entry.name]
    lines = [
        "usage: rlcore COMMAND [OPTION ...] [OVERRIDE ...]",
        "",
        *(f"  {name:<12} {summary}" for name, summary in commands.items()),
        "",
        f"algorithms: {', '.join(algorithms) or 'none installed'}",
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

    Of plugins only the modules of the given command and of rlcore's own engines are imported, for their config keys.
    """
    from rlcore.config.compose import hydra_nodes, schema_node
    from rlcore.plugins import PluginManager, installed, own_sections

    arguments = [argument for argument in argv if "=" in argument]
    if any(argument.startswith("query=") for argument in arguments):
        line = os.environ.get("COMP_LINE", "")
        words = line.split()[1:]
        if not words or line[-1].isspace():
            words.append("")
        commands = _commands()
        if (offered := _next_words(words, commands)) or len(words) == 1:
            print(" ".join(offered))
            return 0
        # hydra completes a program without subcommands: leave out ours, and the runs or models that it takes.
        skipped = 1
        if (name := _longest(words, commands)) is not None:
            given = PluginManager.load_only([commands[name]]).commands()[name]
            skipped = len([*name.split(), *given.usage.split()])
            while given.usage and skipped < len(words) - 1 and "=" not in words[skipped]:
                skipped += 1
        os.environ["COMP_LINE"] = " ".join([line.split()[0], *words[skipped:]])
    nodes = schema_node(own_sections())
    nodes |= {("algo", entry.name): {"algorithm": entry.name} for entry in installed() if "." not in entry.name}
    with hydra_nodes(nodes) as hydra:
        hydra.shell_completion(config_name="config", overrides=arguments)
    return 0


def _next_words(words: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the words that complete the last of these to a command's name."""
    *before, prefix = words
    split = [name.split() for name in names]
    fitting = [name[len(before)] for name in split if name[: len(before)] == before and len(name) > len(before)]
    return [word for word in dict.fromkeys(fitting) if word.startswith(prefix)]


if __name__ == "__main__":
    sys.exit(main())
