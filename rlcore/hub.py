"""Models and data sets by their names on the Hugging Face hub: ORG/NAME or ORG/NAME@REVISION.

A name is pinned once, when a config is composed, to ORG/NAME@COMMIT. Only pinned names are fetched, so that a relative
folder that another node lacks is never taken for a name there. The files are in huggingface_hub's own cache.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlcore.errors import ConfigError, did_you_mean

T = TypeVar("T")
Kind = Literal["model", "dataset"]
Need = Literal["config", "tokenizer", "weights"]
"""The files of a model that a reader needs; each includes those before it."""

_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANY = ("config.json", ".gitattributes")
"""Small files: every repository has the second one, so that a download never matches nothing."""
_TOKENIZER = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_ALLOWED: dict[Need, tuple[str, ...]] = {
    "config": _ANY,
    "tokenizer": (*_ANY, *_TOKENIZER),
    "weights": (*_ANY, *_TOKENIZER, "*.safetensors"),
}
# Folders in a repository hold the model once more, in other formats; consolidated files do too.
_IGNORED = [f"*/*.{ending}" for ending in ("json", "txt", "model", "tiktoken", "safetensors", "py")]
_IGNORED += ["consolidated*.safetensors", "adapter_model*.safetensors"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CARD = "dataset_infos.json"  # an old form of a data set's card
_DATA_FILES = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".gz", ".zip", ".zst")
"""Endings of a file of rows: `rows/train.jsonl` is a path, and no name of a data set."""


def split_name(text: str) -> tuple[str, str | None] | None:
    """Return ORG/NAME and the revision of a name on the hub; None for a path: one of a folder, or below a folder."""
    found = _NAME.fullmatch(text)
    if found is None or Path(text).exists() or Path(text.partition("/")[0]).is_dir():
        return None
    return found[1], found[2]


def is_pinned(text: str) -> bool:
    """Whether a text is ORG/NAME@COMMIT, with all 40 digits of the commit."""
    found = _NAME.fullmatch(text)
    return found is not None and found[2] is not None and _COMMIT.fullmatch(found[2]) is not None


def pin_names(config: T, saved: Mapping[str, Any]) -> T:
    """Return a config whose names on the hub have their commits: those of keys declared with `option(..., hub=KIND)`.

    A relative folder with a name's form gets `./` before it.
    saved: plain values of the run that has begun in the run folder; a name without a revision keeps its commit.
    Raises ConfigError naming the key for a name that the hub and the cache do not have, and for a repository without a
    model.
    """
    pinned: T = _pinned(config, None, "", saved)
    return pinned


def _pinned(value: Any, kind: Kind | Mapping[str, Kind] | None, key: str, saved: Any) -> Any:
    """Return a config object, a mapping or a value with names pinned; the same object where none is.

    kind: the kind of a name, that of all values of a mapping, or the kinds of a mapping's values by key.
    """
    if isinstance(value, str) and isinstance(kind, str):
        return _pinned_text(value, kind, key, saved)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        parts = {field.name: (getattr(value, field.name), field.metadata.get("hub")) for field in fields}
    elif isinstance(value, Mapping):
        parts = {name: (item, kind.get(name) if isinstance(kind, Mapping) else kind) for name, item in value.items()}
    else:
        return value
    pinned = {name: _pinned(part, own, _below(key, name), _at(saved, name)) for name, (part, own) in parts.items()}
    changed = {name: part for name, part in pinned.items() if part is not parts[name][0]}
    if not changed:
        return value
    return {**value, **changed} if isinstance(value, Mapping) else dataclasses.replace(value, **changed)


def _pinned_text(text: str, kind: Kind, key: str, saved: Any) -> str:
    if is_pinned(text) or (kind == "dataset" and Path(text).suffix in _DATA_FILES):
        return text
    if (name_parts := split_name(text)) is None:
        # With `./` it stays a path in the run folder's config, wherever that is read.
        return f"./{text}" if _NAME.fullmatch(text) and Path(text).exists() else text
    repo, revision = name_parts
    if revision is None and isinstance(saved, str) and is_pinned(saved) and saved.startswith(f"{repo}@"):
        return saved
    try:
        return pin(repo, revision, kind)
    except ConfigError as error:
        raise ConfigError(f"{key}={error}") from error


def _below(key: str, name: Any) -> str:
    return str(name) if key in ("", "sections") else f"{key}.{name}"


def _at(saved: Any, name: str) -> Any:
    """Return the value of a key in saved values, None without one.

    A plugin's section has a dotted name, as `rollout.hf`. Config.sections is no level of a saved file.
    """
    for part in [] if name == "sections" else str(name).split("."):
        saved = saved.get(part) if isinstance(saved, Mapping) else None
    return saved


def pin(repo: str, revision: str | None, kind: Kind) -> str:
    """Return ORG/NAME@COMMIT for the commit of a revision, by default the main branch's.

    Asks the hub, or the cache when the hub cannot be reached. Fetches at most a config.json. Raises ConfigError.
    """
    commit = fetch(repo, revision, kind, _ANY).name
    if kind == "model":
        model_folder(f"{repo}@{commit}", "config")
    return f"{repo}@{commit}"


def model_folder(name: str, need: Need, *, code: bool = False) -> Path:
    """Return the local folder of a pinned model, after fetching the files that it lacks; `code`: its *.py files too.

    Raises ConfigError when they cannot be fetched, and for a repository that holds no model that rlcore can read.
    """
    repo, _, commit = name.partition("@")
    allowed = (*_ALLOWED[need], "*.py") if code else _ALLOWED[need]
    folder = fetch(repo, commit, "model", allowed, _IGNORED)
    files = [name for name in _files(repo, commit, "model") if "/" not in name]
    _check_is_model(repo, files)
    index = folder / "model.safetensors.index.json"
    if need == "weights" and index.is_file():
        shards = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        if lacking := sorted(shard for shard in shards if not (folder / shard).is_file()):
            raise ConfigError(f"{name} lacks {lacking[0]} in the cache; run `hf download {repo} --revision {commit}`")
    return folder


def dataset_folder(name: str, subset: str | None, endings: Sequence[str]) -> Path:
    """Return the local folder of a pinned data set, after fetching the files of rows that it lacks.

    These are the files with one of `endings` in the folder `subset`, by default at the top, or in `data` in there.
    Raises ConfigError when they cannot be fetched, and for a data set without any.
    """
    repo, _, commit = name.partition("@")
    fetch(repo, commit, "dataset", _ANY)
    files = _files(repo, commit, "dataset")
    rows = [file for file in files if file.endswith(tuple(endings)) and file not in (*_ANY, _CARD)]
    top = f"{subset}/" if subset else ""
    chosen = [file for file in rows if file.rpartition("/")[0] in (top.rstrip("/"), f"{top}data")]
    if not chosen:
        raise ConfigError(_no_rows(name, subset, files, rows, endings))
    return fetch(repo, commit, "dataset", [*_ANY, *chosen])


def _no_rows(name: str, subset: str | None, files: Sequence[str], rows: Sequence[str], endings: Sequence[str]) -> str:
    """Return the message for a data set, or a subset of it, without a file that can be read."""
    place = f"the data set {name}" + (f" has no subset {subset!r}" if subset else " has no rows at its top or in data/")
    if subsets := sorted({file.partition("/")[0] for file in rows if "/" in file} - {"data"}):
        near = did_you_mean(subset, subsets) if subset else ""
        return f"{place}.{near} Set data.subset to one of its subsets: {', '.join(subsets)}"
    others = ", ".join(file for file in files if file != ".gitattributes")[:200] or "none"
    load = f"load_dataset('{name.partition('@')[0]}').save_to_disk('FOLDER')"
    return (
        f"{place} in a format that rlcore reads ({', '.join(endings)}); its files: {others}. Convert it in Python, "
        f"`from datasets import load_dataset; {load}`, and give that folder"
    )


def fetch(repo: str, revision: str | None, kind: Kind, allow: Sequence[str], ignore: Sequence[str] = ()) -> Path:
    """Fetch the files of a repository that the cache lacks; return their folder there, whose name is the commit.

    allow, ignore: patterns of files, as in huggingface_hub's snapshot_download, whose progress bar shows. Files of a
    commit that are all in the cache need no network. Raises ConfigError with the command that helps.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    options: dict[str, Any] = {"repo_type": kind, "revision": revision}
    get = partial(snapshot_download, repo, **options, allow_patterns=list(allow), ignore_patterns=list(ignore))
    if revision is not None and _COMMIT.fullmatch(revision):
        with suppress(CachedRepoTreeNotFoundError, LocalEntryNotFoundError):  # then it is fetched below
            get_cached_repo_tree(repo, **options)  # without this list the cache cannot tell whether files are missing
            return Path(get(local_files_only=True))
    with _explained(repo, revision, kind):
        return Path(get())


def create_repository(repo: str, *, private: bool) -> None:
    """Create the repository of a model, if it is not there; one that is there stays as private as it is.

    Raises ConfigError for a name of another form, and where the hub cannot be reached or refuses the login.
    """
    from huggingface_hub import HfApi

    found = _NAME.fullmatch(repo)
    if found is None or found[2] is not None:
        raise ConfigError(f"--push={repo} is no name on the hub; write it as ORG/NAME")
    with _explained_push(repo):
        HfApi().create_repo(repo, private=private, exist_ok=True)


def push_folder(folder: Path, repo: str, message: str) -> str:
    """Send a folder's files to a model's repository as one commit, and return its address. Raises ConfigError."""
    from huggingface_hub import HfApi

    with _explained_push(repo):
        return str(HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url)


@contextmanager
def _explained_push(repo: str) -> Iterator[None]:
    """Raise a ConfigError in one line for any failure of an upload, without a text of the client; see _explained."""
    from huggingface_hub import constants, errors

    hub = re.sub(r"//[^/]*@", "//", constants.ENDPOINT)
    try:
        yield
    except Exception as error:  # of the client, of its HTTP library, or of the disk
        cause = getattr(error, "strerror", None) or type(error).__name__
        remedy = "see whether it can be reached, and run the same command again"
        if isinstance(error, errors.HfHubHTTPError):
            cause = f"HTTP {error.response.status_code}"
            if error.response.status_code in (401, 403):
                remedy = (
                    f"log in with `hf auth login` as somebody who may write to {repo.partition('/')[0]}, with a token "
                    "that may write, and unset HF_TOKEN if it holds another one"
                )
        raise ConfigError(f"{repo} cannot be written on the hub ({hub}): {cause}; {remedy}") from None


def _files(repo: str, commit: str, kind: Kind) -> list[str]:
    """Return the paths of a repository's files. Raises ConfigError when the cache has no list and the hub is away."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repo, repo_type=kind, revision=commit)]
    except CachedRepoTreeNotFoundError as error:
        option = " --repo-type dataset" * (kind == "dataset")
        raise ConfigError(
            f"{repo}@{commit}: the cache does not say whether all files are there, and the hub cannot be reached; run "
            f"`hf download {repo}{option} --revision {commit}` where there is a network"
        ) from error


def _check_is_model(repo: str, files: Sequence[str]) -> None:
    fetched = [name for name in files if not any(fnmatch(name, pattern) for pattern in _IGNORED)]
    has_weights = any(name.endswith(".safetensors") for name in fetched)
    if "config.json" not in files and "adapter_config.json" in files:
        raise ConfigError(
            f"{repo} holds an adapter and no model: run `hf download {repo} --local-dir FOLDER`, and give its base "
            "model here and model.lora.path=FOLDER"
        )
    if not has_weights and any(name.endswith(".gguf") for name in files):
        raise ConfigError(
            f"{repo} holds GGUF files, which rlcore neither trains nor samples with; give the model that they were "
            "made from, in safetensors: its page on the hub names it"
        )
    if "config.json" not in files:
        raise ConfigError(f"{repo} has no config.json, so it is not a model of transformers; give one that has")
    if not has_weights and any(name.endswith(_PICKLES) for name in files):
        raise ConfigError(
            f"{repo} holds its weights as pickles only, which can run code when they are read, so rlcore fetches none. "
            f"If you trust it, `hf download {repo} --local-dir FOLDER` and give the folder"
        )
    if not has_weights:
        raise ConfigError(f"{repo} holds no weights in safetensors; give a model that has them")


@contextmanager
def _explained(repo: str, revision: str | None, kind: Kind) -> Iterator[None]:
    """Raise a ConfigError in one line for any failure of a download.

    It holds no text of the client or the server, not even as its cause: a password may be in there.
    """
    from huggingface_hub import constants, errors

    name, what = f"{repo}@{revision}" if revision else repo, "data set" if kind == "dataset" else "model"
    hub = re.sub(r"//[^/]*@", "//", constants.ENDPOINT)  # without a password that is part of it
    command = f"`hf download {repo}{' --repo-type dataset' if kind == 'dataset' else ''}`"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name} is gated: ask for access at {hub}/{'datasets/' * (kind == 'dataset')}{repo}, then "
            "log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{name}: the {what} is on the hub, but has no revision {revision or 'main'!r}; give a branch, a tag or a "
            f"commit of it, or {repo} alone for its main branch"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{name} is neither a folder here nor a {what} on the hub ({hub}).{_nearest(repo, kind)} "
            "Look its name up there; if it is private, log in with `hf auth login`"
        ) from None
    except errors.LocalEntryNotFoundError:
        absent = f"{name} is neither a folder here nor, with all its files, in the cache {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(
                f"{absent}, and HF_HUB_OFFLINE is set.{_nearest(repo, kind)} Unset it, or run {command} where there is "
                "a network"
            ) from None
        raise ConfigError(
            f"{absent}, and the hub ({hub}) cannot be reached.{_nearest(repo, kind)} Run {command} "
            "where there is a network, or give a folder"
        ) from None
    except Exception as error:  # of the client, of its HTTP library, or of the disk
        cause = getattr(error, "strerror", None) or type(error).__name__
        if isinstance(error, errors.HfHubHTTPError):
            cause = f"HTTP {error.response.status_code}"
            if error.response.status_code in (401, 403):
                raise ConfigError(
                    f"{name}: the hub ({hub}) refuses your login ({cause}); log in anew with "
                    "`hf auth login`, and unset HF_TOKEN if it holds an old token"
                ) from None
        raise ConfigError(
            f"{name} cannot be fetched from the hub ({hub}): {cause}. Start again, which keeps the "
            f"files that are whole, or run {command} first"
        ) from None


def _nearest(repo: str, kind: Kind) -> str:
    """Return `" Did you mean 'ORG/NAME'?"` for the nearest name in the cache."""
    from huggingface_hub import constants

    start = f"{kind}s--"
    cached = [path.name.removeprefix(start) for path in Path(constants.HF_HUB_CACHE).glob(f"{start}*--*")]
    return did_you_mean(repo, [name.replace("--", "/") for name in cached])
