"""Loads a Python file by its path, as a module named by its stem, so that it can be sent to workers by value."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from rlcore.errors import PluginError


def load_file(path: Path) -> tuple[ModuleType, str]:
    """Run the file as the top-level module named by its stem and return the module and the file's sha256 (hex).

    Loading the same path again runs the file again. Raises PluginError for a missing file, and for a stem that is not a
    module name or that another module has; an error in the file itself passes through.
    """
    if not path.is_file():
        raise PluginError(f"plugin file {str(path)!r} does not exist (working directory: {Path.cwd()})")
    path = path.resolve()
    name = path.stem
    if path.suffix != ".py" or not name.isidentifier():
        raise PluginError(f"plugin file {path} must be named like a Python module: letters, digits and _, then .py")
    other = _importable(name)
    if other is not None and (other.origin is None or Path(other.origin).resolve() != path):
        raise PluginError(
            f"plugin file {path} would hide the module {name!r} ({other.origin or 'built-in'}); rename the file"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs, as for an import: dataclasses and pickle look the module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module, hashlib.sha256(path.read_bytes()).hexdigest()


def _importable(name: str) -> ModuleSpec | None:
    """Find the module of `import name`, without modules that were themselves loaded from a path."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, None) if find_spec is not None else None
        if spec is not None:
            return spec
    return None
