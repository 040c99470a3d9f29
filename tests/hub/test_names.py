"""Names on the hub: which texts are names, their commits, the files that are fetched, and each failure in one line.

The client is huggingface_hub's own, the hub is on loopback. About 15 s, half of them imports.
"""

import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.utils import enable_progress_bars

from rlcore.assets import TINY
from rlcore.config import ModelConfig
from rlcore.data.chat import check_model_folder, load_tokenizer
from rlcore.errors import ConfigError
from rlcore.hub import dataset_folder, fetch, is_pinned, pin, split_name
from rlcore.model_folder import load_model_config, model_path
from rlcore.plugins import PluginManager
from rlcore.training.preflight import preflight

SETTINGS = {"config.json", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def changed(content: bytes, **values: object) -> bytes:
    """Return JSON with other values."""
    return json.dumps({**json.loads(content), **values}).encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("acme/tiny", ("acme/tiny", None)),
        ("acme/tiny@v1.0", ("acme/tiny", "v1.0")),
        ("acme/tiny@refs/pr/3", ("acme/tiny", "refs/pr/3")),
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("tiny", None),
        ("gpt2", None),
        ("/models/tiny", None),
        ("./models/tiny", None),
        ("../models", None),
        ("~/tiny", None),
        ("models/acme/tiny", None),
        ("acme/tiny@", None),
        ("acme/ti ny", None),
    ],
)
def test_which_texts_are_names(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_name(text) == expected


def test_a_folder_wins_and_a_missing_one_is_missing(hub, tiny, composed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.push("models/tiny", tiny)
    Path("models").mkdir()
    missing = composed("model.path=models/tiny")
    with pytest.raises(
        ConfigError, match=r"model\.path=models/tiny does not exist; .* The hub was not asked, as models/ "
    ):
        check_model_folder(missing.model)
    Path("models/tiny").symlink_to(TINY)
    assert composed("model.path=models/tiny").model.path == "./models/tiny"  # a path wherever its config is read
    assert load_tokenizer(missing.model)
    assert hub.requests == []


def test_a_name_is_pinned_and_only_its_files_are_fetched(hub, tiny, composed):
    hub.push("acme/tiny", {"config.json": b"{}"})
    others = {
        "pytorch_model.bin": b"x",
        "model.gguf": b"x",
        "modeling_own.py": b"x",
        "consolidated.safetensors": b"x",
        "onnx/model.onnx": b"x",
        "onnx/config.json": b"x",
        "README.md": b"x",
    }
    commit = hub.push("acme/tiny", {**tiny, **others})
    config = composed("model.path=acme/tiny")
    assert config.model.path == f"acme/tiny@{commit}"
    assert is_pinned(config.model.path)
    load_model_config(config.model.path, False)
    assert {*hub.downloads()} == {"config.json", ".gitattributes"}
    load_tokenizer(config.model)
    assert {*hub.downloads()} == {*SETTINGS, ".gitattributes"}
    folder = model_path(config.model.path)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".gitattributes",
        *sorted([*SETTINGS, "model.safetensors"]),
    ]
    assert (folder / "model.safetensors").read_bytes() == tiny["model.safetensors"]
    before = len(hub.requests)
    assert model_path(config.model.path) == folder
    assert len(hub.requests) == before
    assert not (folder / "modeling_own.py").exists()
    assert (model_path(config.model.path, code=True) / "modeling_own.py").exists()


def test_every_key_that_names_a_model_is_pinned(hub, tiny, composed):
    commit = hub.push("acme/tiny", tiny)
    hub.push("acme/tiny", tiny, branch="v2")
    second = hub.repositories["model", "acme/tiny"].branches["v2"]
    config = composed("reward.model=acme/tiny", "roles.ref.model=acme/tiny@v2")
    assert (config.reward.model, config.roles["ref"].model) == (f"acme/tiny@{commit}", f"acme/tiny@{second}")
    assert config.model.path == "tiny"
    teachers = composed("algo=on_policy_distill", "algo.teachers={math: acme/tiny, code: tiny}").algo
    assert teachers.teachers == {"math": f"acme/tiny@{commit}", "code": "tiny"}
    assert composed("algo=on_policy_distill", "algo.teacher=acme/tiny").algo.teacher == f"acme/tiny@{commit}"
    assert composed("algo=ppo", "algo.critic_model=acme/tiny").algo.critic_model == f"acme/tiny@{commit}"


def test_a_node_without_the_files_fetches_the_very_commit(hub, tiny, tmp_path):
    first = hub.push("acme/tiny", tiny)
    hub.push("acme/tiny", {**tiny, "model.safetensors": b"moved"})
    program = f"from rlcore.model_folder import model_path; print(model_path('acme/tiny@{first}'))"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "node")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "node")
    assert (folder / "model.safetensors").read_bytes() == tiny["model.safetensors"]


def test_a_broken_download_goes_on_where_it_stopped(hub, tiny, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    enable_progress_bars()  # a model that a test before this one loaded turned them off in this process
    commit = hub.push("acme/tiny", tiny)
    hub.breaks = "model.safetensors", 200
    folder = model_path(f"acme/tiny@{commit}")
    assert (folder / "model.safetensors").read_bytes() == tiny["model.safetensors"]
    resumed = [line.split() for line in hub.requests if line.startswith("RANGE")]
    half = len(tiny["model.safetensors"]) // 2
    assert [name for _, _, name in resumed] == ["model.safetensors"]
    assert half - 2**16 < int(resumed[0][1]) <= half
    assert "100%" in capsys.readouterr().err


def test_data_sets_have_names_too(hub):
    first = hub.push("acme/sums", {"train.jsonl": b'{"prompt": "1+1="}\n'}, kind="dataset")
    pinned = pin("acme/sums", None, "dataset")
    assert pinned == f"acme/sums@{first}"
    hub.push("acme/sums", {"train.jsonl": b""}, kind="dataset")
    folder = fetch("acme/sums", first, "dataset", ["*.jsonl"])
    assert (folder / "train.jsonl").read_bytes() == b'{"prompt": "1+1="}\n'
    with pytest.raises(ConfigError, match=r"^acme/sum is neither a folder here nor a data set .*mean 'acme/sums'\?"):
        pin("acme/sum", None, "dataset")


# Failures


def fault(composed, *overrides):
    """Return the message of the error that stops a command before anything starts."""

    def start():
        config = composed(*overrides)
        preflight(config, PluginManager.load())
        load_tokenizer(config.model)
        model_path(config.model.path)

    with pytest.raises(ConfigError) as caught:
        start()
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    return str(caught.value)


def test_no_such_name(hub, tiny, composed):
    hub.push("acme/tiny", tiny)
    composed("model.path=acme/tiny")
    assert fault(composed, "model.path=acme/tinny") == (
        f"model.path=acme/tinny is neither a folder here nor a model on the hub ({hub.url}). Did you mean 'acme/tiny'? "
        "Look its name up there; if it is private, log in with `hf auth login`"
    )
    assert "the model is on the hub, but has no revision 'v9'" in fault(composed, "model.path=acme/tiny@v9")
    assert fault(composed, "roles.ref.model=acme/absent").startswith("roles.ref.model=acme/absent is neither")


def test_gated(hub, tiny, composed):
    hub.push("acme/gated", tiny, gated=True)
    assert fault(composed, "model.path=acme/gated") == (
        f"model.path=acme/gated is gated: ask for access at {hub.url}/acme/gated, then log in with `hf auth login`"
    )


def test_no_network(hub, tiny, composed):
    commit = hub.push("acme/tiny", tiny)
    composed("model.path=acme/tiny")
    hub.close()
    assert composed("model.path=acme/tiny").model.path == f"acme/tiny@{commit}"  # from the cache
    message = fault(composed, "model.path=acme/other")
    assert "neither a folder here nor, with all its files, in the cache" in message
    assert f"the hub ({hub.url}) cannot be reached." in message
    assert "Run `hf download acme/other` where" in message


def test_offline(hub, tiny, composed, monkeypatch):
    commit = hub.push("acme/tiny", tiny)
    model_path(composed("model.path=acme/tiny").model.path)
    before = len(hub.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = composed("model.path=acme/tiny")
    assert config.model.path == f"acme/tiny@{commit}"
    assert (model_path(config.model.path) / "model.safetensors").is_file()
    message = fault(composed, "model.path=acme/tinny")
    assert "HF_HUB_OFFLINE is set. Did you mean 'acme/tiny'? Unset it, or run `hf download acme/tinny`" in message
    assert len(hub.requests) == before


def test_a_password_of_the_endpoint_is_not_shown(hub, composed, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url.replace("//", "//me:hf_secret@"))
    with pytest.raises(ConfigError) as caught:
        composed("model.path=acme/absent")
    assert f"on the hub ({hub.url})" in str(caught.value)
    assert "hf_secret" not in "".join(traceback.format_exception(caught.value))  # as a worker's error is sent


def test_a_cache_without_a_list_of_files_is_not_taken_for_whole(hub, tiny, composed, monkeypatch):
    """As other programs leave it, which fetch single files."""
    commit = hub.push("acme/tiny", tiny)
    rows = hub.push("acme/sums", {"train.jsonl": b"{}\n", "test.jsonl": b"{}\n"}, kind="dataset")
    hf_hub_download("acme/tiny", "config.json", revision=commit)
    hf_hub_download("acme/sums", "train.jsonl", revision=rows, repo_type="dataset")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"cache|HF_HUB_OFFLINE") as caught:
        model_path(f"acme/tiny@{commit}")
    assert "hf download acme/tiny" in str(caught.value)
    with pytest.raises(ConfigError, match=r"cache|HF_HUB_OFFLINE") as caught:
        dataset_folder(f"acme/sums@{rows}", None, [".jsonl"])
    assert "hf download acme/sums --repo-type dataset" in str(caught.value)


def test_a_shard_that_the_repository_lacks(hub, tiny):
    index = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    )
    files = {**tiny, "model.safetensors.index.json": index.encode(), "model-00001-of-00002.safetensors": b"x"}
    commit = hub.push("acme/half", files)
    with pytest.raises(ConfigError, match=r"acme/half@\w+ lacks model-00002-of-00002\.safetensors in the cache"):
        model_path(f"acme/half@{commit}")


def test_a_server_error_and_a_refused_login(hub, tiny, composed):
    hub.push("acme/tiny", tiny)
    hub.status = 503
    assert "cannot be reached" in fault(composed, "model.path=acme/tiny")
    hub.status = 401
    assert "refuses your login (HTTP 401); log in anew with `hf auth login`" in fault(composed, "model.path=acme/tiny")


@pytest.mark.parametrize(
    ("kept", "added", "expected"),
    [
        (
            ["config.json"],
            ["pytorch_model.bin"],
            "holds its weights as pickles only, .*`hf download acme/odd --local-dir",
        ),
        ([], ["model-Q4_K_M.gguf"], "holds GGUF files, which rlcore neither trains nor samples with"),
        (["config.json"], ["model.gguf"], "holds GGUF files"),
        ([], ["adapter_config.json", "adapter_model.safetensors"], "holds an adapter and no model: run `hf download"),
        ([], ["weights.safetensors"], r"has no config\.json"),
        (["config.json"], [], "holds no weights in safetensors"),
        (["config.json"], ["consolidated.safetensors", "pytorch_model.bin"], "holds its weights as pickles only"),
    ],
)
def test_repositories_without_a_model(hub, tiny, composed, kept, added, expected):
    others = [name for name in SETTINGS if name != "config.json"]
    hub.push("acme/odd", {**{name: tiny[name] for name in [*kept, *others]}, **dict.fromkeys(added, b"x")})
    assert re.match(rf"model\.path=acme/odd {expected}", fault(composed, "model.path=acme/odd"))
    assert not {*added} & {*hub.downloads()}


def test_models_that_are_no_causal_ones_and_templates_that_lack(hub, tiny, composed):
    encoder = changed(tiny["config.json"], model_type="bert", architectures=["BertForMaskedLM"])
    hub.push("acme/encoder", {**tiny, "config.json": encoder})
    assert "is not a causal language model" in fault(composed, "model.path=acme/encoder")
    hub.push("acme/base", {name: content for name, content in tiny.items() if name != "chat_template.jinja"})
    assert "no chat template. Set model.chat_template=FILE" in fault(composed, "model.path=acme/base")
    endless = changed(tiny["tokenizer_config.json"], eos_token=None)
    hub.push("acme/endless", {**tiny, "tokenizer_config.json": endless})
    message = fault(composed, "model.path=acme/endless")
    assert 'Set "eos_token" in the tokenizer_config.json of a folder of your own (`hf download acme/endless' in message
    assert "model.safetensors" not in hub.downloads()


def test_gguf_files_and_folders(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ConfigError, match=r"is a file; .* Of a GGUF file, give the model that it was made from"):
        check_model_folder(ModelConfig(str(file)))
    with pytest.raises(ConfigError, match=r"has no config\.json.* It holds GGUF files: give the model that they were"):
        check_model_folder(ModelConfig(str(tmp_path)))


def test_a_name_in_code_needs_its_commit():
    with pytest.raises(ConfigError, match=r'Only keys declared with option\(\.\.\., hub="model"\) are looked up there'):
        check_model_folder(ModelConfig("acme/tiny"))
