"""Run by the python of a venv that holds TRL: what TRL's own code makes of the tensors on stdin, as JSON on stdout.

GRPO and DPO: TRL 1.16's `_compute_loss`, called with a stand-in for the trainer whose model returns given log-probs.
PPO: TRL 1.12 states GAE and its losses inside `PPOTrainer.train`, so those lines of its source are run as they stand.
"""

import inspect
import json
import sys
import textwrap
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch


def grpo(request):
    from trl.trainer.grpo_trainer import GRPOTrainer

    tensors = {name: torch.tensor(value) for name, value in request["tensors"].items()}
    log_probs = tensors.pop("log_probs").requires_grad_()
    mask = tensors["completion_mask"]
    settings = {"importance_sampling_level": "token", **request["settings"]}
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **settings.pop("args", {})}
    trainer = MagicMock(
        **{"_get_per_token_logps_and_entropies.return_value": (log_probs, torch.zeros_like(log_probs), None)},
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=MagicMock(num_processes=1),
        max_completion_length=mask.shape[1],
        **settings,
    )
    trainer.args = SimpleNamespace(**args)
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    trainer.model.training = True
    trainer.accelerator.gather.side_effect = lambda value: value
    prompts = torch.ones(len(mask), 1, dtype=torch.int64)
    inputs = {"prompt_ids": prompts, "prompt_mask": prompts, "completion_ids": mask, **tensors}
    inputs["num_items_in_batch"] = mask.sum()
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return {"loss": loss.item(), "grad": log_probs.grad.tolist()}


def dpo(request):
    from trl.trainer.dpo_trainer import DPOTrainer

    tensors = {name: torch.tensor(value) for name, value in request["tensors"].items()}
    log_probs = tensors["log_probs"].requires_grad_()  # [chosen then rejected, tokens]
    ones = torch.ones_like(log_probs, dtype=torch.int64)
    mask = torch.cat([torch.zeros(len(ones), 1, dtype=torch.int64), ones], dim=1)  # a prompt of one token
    outputs = MagicMock(log_probs=log_probs, entropy=torch.zeros_like(log_probs), mean_logits=log_probs.detach())
    outputs.is_top1 = torch.zeros_like(log_probs, dtype=torch.bool)
    trainer = MagicMock(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_weights=[1.0],
        use_weighting=False,
        **request["settings"],
    )
    trainer.accelerator.gather_for_metrics.side_effect = lambda value: value
    ref = tensors["ref_log_probs"].sum(1)
    half = len(ref) // 2
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": ref[:half], "ref_rejected_logps": ref[half:]}
    loss = DPOTrainer._compute_loss(trainer, MagicMock(return_value=outputs), inputs, False)
    loss.backward()
    return {"loss": loss.item(), "grad": log_probs.grad.tolist()}


def ppo(request):
    from trl.experimental.ppo import ppo_trainer

    tensors = {name: torch.tensor(value) for name, value in request["tensors"].items()}
    rows, width = tensors["logprobs"].shape
    none_padded = torch.zeros(rows, width, dtype=torch.bool)
    values = {
        **vars(ppo_trainer),
        **tensors,
        "args": SimpleNamespace(whiten_rewards=False, **request["settings"]),
        "responses": torch.zeros(rows, width),
        "sequence_lengths_p1": torch.full((rows,), width),
        "sequence_lengths": torch.full((rows,), width - 1),
        "padding_mask": none_padded,
        "padding_mask_p1": none_padded,
        "micro_batch_inds": torch.arange(rows),
    }
    source = inspect.getsource(ppo_trainer.PPOTrainer.train)
    _run(source, "# 4. compute rewards", "empty_cache()", values)
    values |= {f"mb_{name}": values[f"{name}s"] for name in ("return", "advantage")}
    values |= {"mb_values": tensors["values"], "mb_logprobs": tensors["logprobs"]}
    new_logprobs = tensors["new_logprobs"].requires_grad_()
    vpred = tensors["vpred"].requires_grad_()
    values |= {"new_logprobs": new_logprobs, "vpred": vpred}
    _run(source, "vpredclipped = torch.clamp(", "loss = pg_loss", values)
    values["pg_loss"].backward()
    values["vf_loss"].backward()
    given = ("rewards", "returns", "advantages")
    return {
        **{name: values[name].tolist() for name in given},
        "policy_loss": values["pg_loss"].item(),
        "policy_grad": new_logprobs.grad.tolist(),
        "value_loss": values["vf_loss"].item(),
        "value_grad": vpred.grad.tolist(),
    }


def _run(source, first, last, values):
    """Run the lines of `source` from the one that holds `first` up to the one that holds `last`."""
    lines = source.splitlines()
    start = next(number for number, line in enumerate(lines) if first in line)
    end = next(number for number in range(start, len(lines)) if last in lines[number])
    exec(textwrap.dedent("\n".join(lines[start:end])), values)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    json.dump({"grpo": grpo, "dpo": dpo, "ppo": ppo}[request["what"]](request), sys.stdout)
