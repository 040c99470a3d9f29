"""SFT: supervised fine-tuning on a data set's responses (step 1 of InstructGPT, arXiv 2203.02155).

With y the response of prompt x, its end-of-text token included, and all sums over the rows of a mini-batch, the policy
minimises the mean negative log-likelihood of the response tokens,

    L = - sum_y sum_t log pi(y_t | x, y_<t) / sum_y |y|

Prompts are read but not learned. Only evaluations sample and score.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore import Algorithm, AlgorithmSpec, Config, ConfigError, DataError, DataProto, Run, hookimpl, option
from rlcore.ops import Outputs, Term, masked_sum, metric, needs, objective

RLCORE_API = 1


@dataclass(frozen=True)
class SFTConfig:
    """Settings of SFT."""

    response_key: str = option("answer", "column with the response; `answer` means the column of data.answer_key")
    epochs: int = option(1, "passes over each step's rows", min=1)
    mini_batches: int = option(1, "optimizer steps per pass", min=1)


@needs("log_probs", "entropy")
def sft_loss(out: Outputs, batch: Mapping[str, Any], config: SFTConfig) -> dict[str, Term]:
    """Return L of the module's docstring as `nll`; tokens with response_mask 0 are ignored."""
    mask = batch["response_mask"]
    return {
        "nll": objective(-masked_sum(out.log_probs, mask), mask.sum()),
        "entropy": metric(masked_sum(out.entropy, mask), mask.sum()),
    }


class SFT(Algorithm):
    """One step: take the rows' responses and raise their likelihood. The actor generates only in evaluations."""

    config_class = SFTConfig
    uses_reward = False
    config: SFTConfig

    def check(self, config: Config) -> None:
        """Raise ConfigError for a temperature other than 1, and for fewer rows than mini-batches."""
        if config.rollout.temperature != 1:
            raise ConfigError(
                f"rollout.temperature={config.rollout.temperature:g}: log-probs are at that temperature, so SFT would "
                "fit a distribution other than the model's; leave it at 1 (trainer.eval_temperature sets evaluations')"
            )
        if config.data.batch_size < self.config.mini_batches:
            raise ConfigError(
                f"algo.mini_batches is {self.config.mini_batches}, but a step has only data.batch_size = "
                f"{config.data.batch_size} rows; make it at most {config.data.batch_size}"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row without the text of a response."""
        key = self.config.response_key
        if key not in row:
            raise DataError(
                f"algo.response_key={key}: the row has no such column, only {', '.join(row)}; `answer` is that of "
                "data.answer_key, or the assistant's last message in a prompt column `messages` (data.prompt_key)"
            )
        text = row[key]
        if text is None or (isinstance(text, str) and not text.strip()):
            raise DataError(
                f"there is no response in column {key!r}: it holds {text!r}. SFT needs a text in every row; drop the "
                "row, or set algo.response_key or data.answer_key to the right column"
            )
        if not isinstance(text, str):
            raise DataError(
                f"column {key!r} holds {text!r:.80}, which is of type {type(text).__name__}; a response is a text, so "
                "write it as a string in the data, or in `completion` as one message of the assistant; put the "
                "messages before it into the prompt"
            )

    def step(self, run: Run, prompts: DataProto) -> Mapping[str, Any]:
        """Run one step and return the update's metrics, and the share of responses that fill rollout.response_len."""
        batch = prompts.union(run.encode(prompts, self.config.response_key))
        metrics = run.actor.update(
            batch, loss=sft_loss, epochs=self.config.epochs, mini_batches=self.config.mini_batches
        )
        full = batch["responses"].lengths >= run.config.rollout.response_len
        return {**metrics, "sft/full_length": float(full.float().mean())}


@hookimpl
def rlcore_algorithm() -> AlgorithmSpec:
    """Register SFT."""
    return AlgorithmSpec("sft", SFT)
