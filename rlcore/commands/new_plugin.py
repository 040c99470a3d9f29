"""`rlcore new-plugin`: write the distribution of a new plugin."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlcore import CommandSpec, hookimpl
from rlcore.commands import SUMMARIES
from rlcore.commands.line import CommandLine

RLCORE_API = 1


def main(argv: list[str]) -> int:
    """Write the folder and print the next commands."""
    parser = argparse.ArgumentParser(prog="rlcore new-plugin", allow_abbrev=False, description=SUMMARIES["new-plugin"])
    parser.add_argument("name", metavar="NAME", help="the plugin's name, such as my-algo: then algo=my_algo")
    parser.add_argument("--kind", default="algorithm", help="algorithm (the default) or environment")
    parser.add_argument(
        "--dir", default=".", help="parent of the new folder rlcore-plugin-NAME (default: the current folder)"
    )
    options = parser.parse_args(argv)
    from rlcore.plugins.new import new_plugin, use_of

    folder, *files = new_plugin(options.name, Path(options.dir), options.kind)
    name = files[0].stem.removeprefix("rlcore_plugin_")
    lines = [f"wrote {folder}:", *(f"  {file.relative_to(folder)}" for file in files), "next:"]
    lines += [
        f"  pip install -e '{folder}[test]'",
        f"  rlcore plugins test {name}",
        f"  rlcore train {use_of(name, options.kind)}",
    ]
    CommandLine.show("\n".join(lines))
    return 0


@hookimpl
def rlcore_commands() -> CommandSpec:
    """Register `rlcore new-plugin`."""
    return CommandSpec("new-plugin", SUMMARIES["new-plugin"], main)
