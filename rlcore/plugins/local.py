"""Loads Python files by their path, so that they can be sent to other processes by value."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcore.errors import ConfigError, PluginError, did_you_mean
from rlcore.plugins.entries import cause_of
from rlcore.plugins.import_limit import import_limit


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
        with import_limit(f"plugin file {path}"):
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


def load_name(reference: str, kind: str, noun: str, accepts: Callable[[Any], bool], how: str) -> tuple[Any, ModuleType]:
    """Load the object FILE.py:NAME and return it with the file's module, which stays out of sys.modules.

    `kind` ("reward") and `noun` ("function") are for messages, and `how` says what to write. Raises ConfigError for a
    file that is missing or does not load, for a name that it does not have, and for an object that is not accepted.
    """
    text, _, name = reference.rpartition(":")
    path = Path(text or reference).expanduser()
    name = name if text else ""
    if not path.is_file():
        raise ConfigError(f"{kind} {reference!r}: there is no file {path.resolve()}")
    module = _run(path, kind, reference)
    if not name or not hasattr(module, name):
        own = sorted(key for key, value in vars(module).items() if accepts(value) and _defined_in(module, value))
        raise ConfigError(
            f"{kind} {reference!r}: {path} has no {noun} {name!r}; it has {', '.join(own) or 'none'}."
            f"{did_you_mean(name, own)} The form is FILE.py:{noun.upper()}."
        )
    found = getattr(module, name)
    if not accepts(found):
        a = "an" if noun[0] in "aeiou" else "a"
        raise ConfigError(f"{kind} {reference!r}: {name} is a {type(found).__name__}, not {a} {noun}. {how}")
    return found, module


@contextlib.contextmanager
def pickled_by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Make cloudpickle pickle functions and classes of these modules by value until the context ends."""
    import cloudpickle  # only here: the command line loads this file at every start

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_known(module))
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _run(path: Path, kind: str, reference: str) -> ModuleType:
    # The prefix keeps a file called math.py from shadowing the module of that name.
    spec = importlib.util.spec_from_file_location(f"rlcore_{kind}_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _known(module):
        try:
            with import_limit(f"{kind} file {path}"):
                spec.loader.exec_module(module)
        # SystemExit too: a file that calls sys.exit must not end the command without a word.
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{kind} {reference!r}: {path} cannot be loaded: {cause_of(error)}. Only this file is"
                f" sent to the {kind} processes: install its imports on every machine."
            ) from error
    return module


def _defined_in(module: ModuleType, value: Any) -> bool:
    return not callable(value) or getattr(value, "__module__", None) == module.__name__


@contextlib.contextmanager
def _known(module: ModuleType) -> Iterator[None]:
    """Hold the module in sys.modules, where dataclasses and cloudpickle look it up, until the context ends."""
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before
