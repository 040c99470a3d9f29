"""Engines, prompts and runs of a model that really speaks, beside transformers' own. They cost N minutes of a core."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real import questions
from rlcore.config import DataConfig, ModelConfig, compose
from rlcore.data.chat import load_tokenizer
from rlcore.data.loader import held_out_prompts
from rlcore.engine.rollout import Sampling
from rlcore.engines.hf.rollout import HFRollout
from rlcore.plugins import PluginManager
from rlcore.training.evaluate import evaluate_target
from rlcore.training.trainer import train

CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You count: 1, 2, 30, 456.\n\nThen  you stop."},
        {"role": "user", "content": "Name a colour of the sky."},
    ],
    [
        {"role": "user", "content": "Ça va?\n\n7"},
        {"role": "assistant", "content": "Très bien, 10 of 10!"},
        {"role": "user", "content": "What is two plus two?"},
    ],
]
MOST = 24


@pytest.fixture(scope="module")
def hf(folder):
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    """transformers' own tokenizer."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompts(folder, tmp_path_factory):
    """The conversations as rlcore reads them from a file."""
    rows = tmp_path_factory.mktemp("data") / "test.jsonl"
    rows.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in CONVERSATIONS))
    data = DataConfig(name="file", path=str(rows.parent), eval_split="test")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    batch = held_out_prompts(data, PluginManager.load().datasets()["file"], tokenizer)
    batch["sample_index"] = torch.zeros(len(batch), dtype=torch.int64)
    return batch


@pytest.fixture(scope="module")
def greedy(folder, prompts):
    """The greedy responses of rollout=hf."""
    model = ModelConfig(path=str(folder), dtype="fp32")
    rollout = HFRollout(model, batch_size=8, device=torch.device("cpu"), shared=None)
    rollout.version = 0
    return rollout.generate(prompts, Sampling(max_tokens=MOST, temperature=0.0))


def test_prompts_are_those_of_apply_chat_template(prompts, tokenizer):
    for ids, conversation in zip(prompts["prompts"].to_list(), CONVERSATIONS, strict=True):
        want = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
        assert ids.tolist() == want["input_ids"]


def test_greedy_text_is_that_of_generate(prompts, greedy, hf, tokenizer):
    texts = []
    for ids, response in zip(prompts["prompts"].to_list(), greedy["responses"].to_list(), strict=True):
        want = hf.generate(ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=MOST)
        assert response.tolist() == want[0, len(ids) :].tolist()
        texts.append(tokenizer.decode(response, skip_special_tokens=True))
    assert "Paris" in texts[0]
    assert len(set(texts)) == len(texts)


def test_the_end_token_ends_a_response(greedy, tokenizer):
    """The first answer is a sentence, then the end; all after it would be another turn."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    responses = [row.tolist() for row in greedy["responses"].to_list()]
    assert responses[0][-1] == end
    assert len(responses[0]) < MOST
    for response in responses:
        assert end not in response[:-1]
        assert response[-1] == end or len(response) == MOST


REWARD = """
def length(prompt, response, answer):
    return len(response)
"""


class Breaking(PluginManager):
    """Breaks a run at the end of its second step, before that step's checkpoint."""

    def step_end(self, run, step, metrics):
        super().step_end(run, step, metrics)
        if step == 2:
            raise RuntimeError("stop here")


def test_a_resumed_run_goes_on_bit_for_bit(folder):
    """The second step is done again after the first one's checkpoint: equal metrics and weights."""
    # Half a billion bytes of weights and twice that of moments, several times: not for pytest to keep.
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        questions.write(home / "questions")
        (home / "reward.py").write_text(REWARD)
        words = [
            *("algo=grpo", "algo.group_size=2", "algo.kl_coef=0", "cluster=in_process", "tracker=none"),
            *(f"model.path={folder}", "data=file", f"data.path={home / 'questions'}", "data.batch_size=1"),
            *(f"reward.path={home / 'reward.py'}:length", "rollout.response_len=8", "engine.lr=1e-5"),
            *("trainer.total_steps=2", "trainer.checkpoint_every=1", "trainer.eval_every=0"),
            "trainer.keep_checkpoints=1",
        ]

        def run(name: str, manager: type[PluginManager] = PluginManager) -> tuple[list[dict], dict[str, torch.Tensor]]:
            """Return the run's metrics without those of the clock, and its last weights."""
            plugins = manager.load()
            train(compose([*words, f"run.dir={home / name}"], plugins), plugins)
            lines = (home / name / "metrics.jsonl").read_text().splitlines()
            clock = ("time/", "timeline/", "throughput/")
            metrics = [{k: v for k, v in json.loads(line).items() if not k.startswith(clock)} for line in lines]
            weights = load_file(home / name / "checkpoints" / "step_00000002" / "actor" / "model" / "model.safetensors")
            return metrics, weights

        straight, want = run("straight")
        with pytest.raises(RuntimeError, match="stop here"):
            run("resumed", Breaking)
        resumed, weights = run("resumed")
        assert resumed == straight
        assert straight[-1]["train/grad_norm"] > 0
        assert weights.keys() == want.keys()
        assert all(torch.equal(tensor, want[name]) for name, tensor in weights.items())


ADD = """
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: a number
        b: another
    '''
    return a + b
"""


def called(a, b):
    """The assistant's turn that calls the tool, and the tool's answer."""
    call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    return [
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(a + b)},
    ]


def test_an_episode_calls_a_tool_and_reads_its_result(folder, tokenizer, tmp_path):
    """Sampled greedily after two examples: a call, its result as a turn that is not sampled, and the answer."""
    examples = [
        *({"role": "user", "content": "What is 214 + 305?"}, *called(214, 305)),
        {"role": "assistant", "content": "#### 519"},
        *({"role": "user", "content": "What is 120 + 642?"}, *called(120, 642)),
        {"role": "assistant", "content": "#### 762"},
    ]
    sums = [(331, 456), (507, 281)]
    rows = [
        {"prompt": [*examples, {"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a, b in sums
    ]
    data, tool = tmp_path / "test.jsonl", tmp_path / "tool.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tool.write_text(ADD)
    words = [
        *(f"model.path={folder}", "cluster=in_process", "data=file", f"data.path={tmp_path}", "data.eval_split=test"),
        *("reward=gsm8k", "env=file", f"env.path={tool}:add", "env.tool_format=hermes", "data.prompt_len=1024"),
        *("rollout.response_len=96", "trainer.eval_temperature=0"),
    ]
    plugins = PluginManager.load()
    (evaluation,) = evaluate_target(folder, compose(words, plugins), plugins).values()
    batch = evaluation.batch
    for row, (a, b) in enumerate(sums):
        call, result = called(a, b)
        turns = [f"{call['content']}<|im_end|>", f"#### {a + b}<|im_end|>"]
        between = f"\n<|im_start|>tool\n{result['content']}<|im_end|>\n<|im_start|>assistant\n"
        tokens, mask = batch["responses"][row], batch["response_mask"][row]
        assert tokenizer.decode(tokens) == between.join(turns)
        assert tokenizer.decode(tokens[mask == 1]) == "".join(turns)
    assert batch["tool_calls"].tolist() == [1, 1]
    assert batch["tool_errors"].tolist() == [0, 0]
    assert batch["scores"].tolist() == [1.0, 1.0]
