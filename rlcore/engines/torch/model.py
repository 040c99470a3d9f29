"""A Hugging Face model for the train engine: packed tokens in; log-probs, values or scores of selected tokens out."""

from __future__ import annotations

import functools
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

from rlcore.config import ModelConfig
from rlcore.engine.attention import plain_attention
from rlcore.engine.device import pays_to_compile
from rlcore.engine.parallel.model_shape import FULL_ATTENTION, attention_kinds
from rlcore.engines.torch.packing import PACKED_ATTENTION, Packing, register_packed_attention
from rlcore.engines.torch.varlen import VARLEN_ATTENTION, register_varlen_attention
from rlcore.errors import ConfigError
from rlcore.model_folder import model_path, router_options
from rlcore.ops import chunked_log_probs, token_log_probs

log = logging.getLogger(__name__)


ACTIVATION_BUDGET = 0.8
"""Share of a compiled layer's activations that are kept for backward; cheap ones beyond it are computed again.

On an H100 this takes 27 % of the memory away for 2 % more time; 0.5 takes 51 % for 12 % (docs/gpu.md).
"""


_OF_LOGITS = re.compile(r"logit.*(cap|scal|multipl)|lm_head_multiplier")
"""Names of settings that change logits: final_logit_softcapping, logit_scale, logits_scaling, lm_head_multiplier."""


class PackedModel(nn.Module, ABC):
    """A Hugging Face model that reads packed rows.

    `packed`: the model gets the rows end to end without padding; otherwise the rows are padded on the right.
    """

    hf: Any  # a transformers.PreTrainedModel

    def __init__(self, hf: Any, *, packed: bool) -> None:
        super().__init__()
        self.hf = hf
        self.packed = packed
        self.vocab_size = self._vocabulary()
        self._compiled_layers: dict[nn.Module, Callable[..., Any]] = {}

    def _vocabulary(self) -> int:
        return self.hf.get_input_embeddings().weight.shape[0]

    @property
    def base(self) -> Any:
        """The decoder without its head."""
        return getattr(self.hf, self.hf.base_model_prefix)

    @abstractmethod
    def forward(
        self, packing: Packing, select: Tensor, labels: Tensor, needs: Collection[str], temperature: float
    ) -> dict[str, Tensor]:
        """Return the outputs `needs` by name, each [selected, ...], for the tokens `labels` int64 [selected].

        `select` int64 [selected] are indices into the packed tokens: for values and scores the position itself, for
        other outputs the position that predicts the label. `log_probs` and `entropy` are fp32 in nats at
        `temperature`; `logits` [selected, vocab] are divided by it; `values` and `scores` are fp32.
        """

    @abstractmethod
    def read(self, hidden: Tensor, labels: Tensor, needs: Collection[str], temperature: float) -> dict[str, Tensor]:
        """Return the outputs of `forward` from the last `hidden` state [selected, hidden]."""

    def hidden(self, packing: Packing, select: Tensor) -> Tensor:
        """Return the last hidden state [selected, hidden]."""
        hidden = self._run(self.base, packing).last_hidden_state
        return (hidden[0] if self.packed else packing.unpad(hidden)).index_select(0, select)

    def decode(self, packing: Packing, hidden: Tensor | None) -> Tensor:
        """Run one pipeline stage's layers and return [1, tokens, hidden].

        Input: the packed tokens on the first stage, `hidden` [1, tokens, hidden] on the others.
        """
        return self._run(self.base, packing, hidden).last_hidden_state

    def pack(self, sequences: Sequence[Tensor], prompts: Sequence[int], total: int = 0) -> Packing:
        """Pack int64 sequences [length], with prompts of the lengths `prompts`, in the form that this model reads.

        Filling rows bring the packing to `total` tokens, or to a size of the attention's own choice.
        """
        if self.packed and self.attention == VARLEN_ATTENTION:
            return Packing.in_segments(sequences, prompts, total)
        return Packing.of(sequences, total, prompts if self.packed and self.attention == PACKED_ATTENTION else None)

    @property
    def has_equal_layers(self) -> bool:
        """Whether the decoder is a list of layers of one class, so that code for one serves all."""
        return len({type(layer) for layer in getattr(self.base, "layers", ())}) == 1

    def compile_layers(self) -> None:
        """Have torch.compile make the code of a decoder layer; all layers and all numbers of tokens share it."""
        layers = self.base.layers
        forward = torch.compile(type(layers[0]).forward)
        self._compiled_layers = {layer: functools.partial(_any_length, forward, layer) for layer in layers}

    def run_layers_plainly(self) -> None:
        """Undo `compile_layers`."""
        self._compiled_layers = {}

    @contextmanager
    def in_compiled_layers(self) -> Iterator[None]:
        """Meanwhile layers run in their compiled form, if they have one; also when a backward recomputes them.

        Elsewhere they run plainly: a rollout engine may share the module, for shapes of its own.
        """
        if not self._compiled_layers:
            yield
            return
        for layer, forward in self._compiled_layers.items():
            layer.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self._compiled_layers:
                del layer.forward

    def _run(self, module: nn.Module, packing: Packing, hidden: Tensor | None = None) -> Any:
        if not self.packed:
            (rows,) = packing.parts
            steps = torch.arange(rows.longest, device=packing.lengths.device)[None]
            mask = (steps < packing.lengths[:, None]).long()
            positions = steps.expand(rows.rows, -1)
            ids = rows.to_padded(packing.input_ids) * mask
            return module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        tokens = {"input_ids": packing.input_ids[None]} if hidden is None else {"inputs_embeds": hidden}
        return module(
            **tokens,
            attention_mask=None,
            position_ids=packing.positions[None],
            use_cache=False,
            **self._attention_arguments(packing),
        )

    def _attention_arguments(self, packing: Packing) -> dict[str, Any]:
        if packing.segments is not None:
            return {"segments": packing.segments}
        return {"packing": packing} if self.attention == PACKED_ATTENTION else packing.flash_kwargs()

    @property
    def description(self) -> str:
        """The attention implementation and the form of batches, in words."""
        names = {PACKED_ATTENTION: "sdpa", VARLEN_ATTENTION: "by kernels of variable length"}
        form = "packed" if self.packed else "padded"
        compiled = ", layers compiled" if self._compiled_layers else ""
        return f"attention {names.get(self.attention, self.attention)}, rows {form}{compiled}"

    @property
    def attention(self) -> str:
        """The attention implementation, as transformers names it."""
        return self.hf.config._attn_implementation


class CausalLM(PackedModel):
    """A causal language model.

    `fused_head`: compute logits chunk by chunk from the last hidden state; otherwise the model computes all of them.
    `compiled`: the passes over these chunks are compiled.
    """

    def __init__(self, hf: Any, *, packed: bool, fused_head: bool, chunk: int, compiled: bool = False) -> None:
        super().__init__(hf, packed=packed)
        self.fused_head, self.chunk, self.compiled = fused_head, chunk, compiled

    def _vocabulary(self) -> int:
        return self.hf.get_output_embeddings().weight.shape[0]

    def forward(
        self, packing: Packing, select: Tensor, labels: Tensor, needs: Collection[str], temperature: float
    ) -> dict[str, Tensor]:
        """See PackedModel."""
        if self.fused_head and "logits" not in needs:
            return self.read(self.hidden(packing, select), labels, needs, temperature)
        logits = self._run(self.hf, packing).logits
        logits = (logits[0] if self.packed else packing.unpad(logits)).index_select(0, select)
        return _of_logits(logits, labels, needs, temperature)

    def read(self, hidden: Tensor, labels: Tensor, needs: Collection[str], temperature: float) -> dict[str, Tensor]:
        """See PackedModel."""
        head = self.hf.get_output_embeddings()
        if "logits" in needs:
            return _of_logits(head(hidden), labels, needs, temperature)
        log_probs, entropy = chunked_log_probs(
            hidden,
            head.weight.to(hidden.dtype),
            labels,
            bias=None if head.bias is None else head.bias.to(hidden.dtype),
            temperature=temperature,
            chunk=self.chunk,
            compiled=self.compiled,
        )
        return {name: value for name, value in (("log_probs", log_probs), ("entropy", entropy)) if name in needs}


def _any_length(forward: Callable[..., Any], layer: nn.Module, hidden_states: Tensor, **arguments: Any) -> Any:
    """Run a decoder layer's compiled `forward` with the number of tokens, dimension 1, as a variable."""
    by_token = [hidden_states, *arguments["position_embeddings"]]
    if arguments.get("position_ids") is not None:
        by_token.append(arguments["position_ids"])
    for each in by_token:
        torch._dynamo.mark_dynamic(each, 1)
    before, functorch.activation_memory_budget = functorch.activation_memory_budget, ACTIVATION_BUDGET
    try:
        return forward(layer, hidden_states, **arguments)
    finally:
        functorch.activation_memory_budget = before


def _of_logits(logits: Tensor, labels: Tensor, needs: Collection[str], temperature: float) -> dict[str, Tensor]:
    logits = logits.float() / temperature
    log_probs, entropy = token_log_probs(logits, labels)
    # Not a view: FSDP gathers the weights for the backward in a hook on each output, and an in-place operation on a
    # view would drop the hook.
    values = {"log_probs": log_probs.clone(), "entropy": entropy, "logits": logits}
    return {name: value for name, value in values.items() if name in needs}


class ScalarModel(PackedModel):
    """A sequence-classification model with one label: its head gives a number for each position.

    Reward models and critics have this form. A critic reads the number at every position that predicts a token.
    """

    def forward(
        self, packing: Packing, select: Tensor, labels: Tensor, needs: Collection[str], temperature: float
    ) -> dict[str, Tensor]:
        """See PackedModel."""
        return self.read(self.hidden(packing, select), labels, needs, temperature)

    def read(self, hidden: Tensor, labels: Tensor, needs: Collection[str], temperature: float) -> dict[str, Tensor]:
        """See PackedModel."""
        return dict.fromkeys(needs, self.hf.score(hidden).float().squeeze(-1).clone())  # not a view, see _of_logits


Model = TypeVar("Model", bound=PackedModel)
Read = Callable[[Model, Packing, Tensor, Tensor], Tensor]
"""From a model, a packing, `select` and `labels` of PackedModel.forward to the outputs that a probe compares."""


def load_causal_lm(
    config: ModelConfig,
    *,
    padding_free: bool,
    chunk: int,
    device: torch.device,
    compiles: bool = False,
    compiles_layers: bool = False,
) -> CausalLM:
    """Load the model folder in fp32 and choose the form of its forward.

    A fast form is used only if it agrees with the model's own forward on a probe of two short rows; otherwise one line
    in the log gives the reason. `compiles` and `compiles_layers`: try compiled passes over logits, and compiled decoder
    layers, where they pay. Raises ConfigError for a
    folder that does not load as a causal LM.
    """
    from transformers import AutoModelForCausalLM

    hf, _ = _load(AutoModelForCausalLM, "causal language model", config, device)

    def log_probs(model: CausalLM, packing: Packing, select: Tensor, labels: Tensor) -> Tensor:
        return model(packing, select, labels, ("log_probs",), 1.0)["log_probs"]

    plain = CausalLM(hf, packed=False, fused_head=False, chunk=chunk)
    expected = _probe(plain, log_probs).detach()
    model = CausalLM(hf, packed=False, fused_head=True, chunk=chunk)
    if changed := _changed_logits(hf.config.get_text_config()):
        model.fused_head = False
        log.info("%s is set: the model computes its own logits", changed)
    else:
        model.fused_head = _agrees("computing logits in chunks", model, log_probs, expected)
    if compiles and model.fused_head and pays_to_compile(device, hf.num_parameters()):
        model.compiled = True
        model.compiled = _agrees("compiling the passes over logits", model, log_probs, expected)
    if padding_free and _packing_applies(hf):
        compiled = compiles_layers and pays_to_compile(device, hf.num_parameters())
        model.packed = True
        return _pack(model, log_probs, expected, kernels=_has_kernels(config, device), compiles=compiled)
    return model


def load_scalar_model(
    config: ModelConfig, *, new_head: bool, padding_free: bool, device: torch.device, compiles_layers: bool = False
) -> ScalarModel:
    """Load the model folder in fp32 as a sequence-classification model with one label.

    `new_head`: a folder without such a head, as of a causal language model, gets a head of zeros. Raises ConfigError
    for a folder that does not load, has another number of labels, or lacks the head while `new_head` is off.
    """
    from transformers import AutoModelForSequenceClassification

    what = "sequence-classification model with one label"
    hf, loading = _load(AutoModelForSequenceClassification, what, config, device, num_labels=1)
    if not isinstance(getattr(hf, "score", None), nn.Linear):
        raise ConfigError(
            f"{config.path!r}: {type(hf).__name__} is not supported, as it has no linear head named `score`"
        )
    if any(name.startswith("score.") for name in loading["missing_keys"]):
        if not new_head:
            raise ConfigError(
                f"{config.path!r} has no weights of a score head, so it is not a reward model; give a folder that was "
                "saved as AutoModelForSequenceClassification (docs/roles.md says which algorithm trains one)"
            )
        for parameter in hf.score.parameters():
            nn.init.zeros_(parameter)

    def hidden(model: ScalarModel, packing: Packing, select: Tensor, labels: Tensor) -> Tensor:
        return model.hidden(packing, select)  # not the score: a head of zeros would hide any difference

    plain = ScalarModel(hf, packed=False)
    if not (padding_free and _packing_applies(hf)):
        return plain
    compiled = compiles_layers and pays_to_compile(device, hf.num_parameters())
    model, expected = ScalarModel(hf, packed=True), _probe(plain, hidden).detach()
    return _pack(model, hidden, expected, kernels=_has_kernels(config, device), compiles=compiled)


def _load(kind: Any, what: str, config: ModelConfig, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """Return the model on its device, in evaluation mode, and transformers' loading report."""
    from transformers.utils import logging as notices

    register_packed_attention()
    register_varlen_attention()
    notices.disable_progress_bar()
    before = notices.get_verbosity()
    notices.set_verbosity_error()  # it warns of new heads; the checks below report wrong shapes
    folder = model_path(config.path, code=config.trust_remote_code)
    try:
        hf, loading = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=plain_attention(config),
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the checks below report them by name
            **router_options(config),
            **options,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"model folder {config.path!r} ({folder}) does not load as a {what}: {error}") from error
    finally:
        notices.set_verbosity(before)
    hf.to(device).eval()
    misfits = sorted(str(each[0]) for each in loading["mismatched_keys"])
    lacking = sorted(name for name in loading["missing_keys"] if not name.startswith("score."))
    unused = [
        name for name in loading["unexpected_keys"] if not (name.startswith("lm_head.") and "num_labels" in options)
    ]
    deeper = _of_more_layers(unused, dict(hf.named_parameters()))
    broken = [name for name, weight in hf.named_parameters() if not _is_finite(weight)]
    for fault, names in (
        ("other shapes for", misfits),
        ("no weights for", lacking),
        ("weights of more layers than its config.json names:", deeper),
        ("weights that are NaN or infinite:", broken),
    ):
        if names:
            raise ConfigError(f"model folder {config.path!r} does not load as a {what}: it has {fault} {_some(names)}")
    if unused:
        log.warning("model folder %r has weights that a %s does not use: %s", config.path, what, _some(sorted(unused)))
    hf.config.architectures = [type(hf).__name__]  # the class that saved folders name
    return hf, loading


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of_more_layers(unused: Sequence[str], used: Collection[str]) -> list[str]:
    """Return the unused names that differ from a used one in a number only."""
    kinds = {re.sub(r"\.\d+\.", ".N.", name) for name in used}
    return sorted(name for name in unused if re.sub(r"\.\d+\.", ".N.", name) in kinds)


def _is_finite(weight: Tensor) -> bool:
    """Whether all numbers are finite. Their sum says so in one pass, unless it overflows."""
    weight = weight.detach()
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())


def _changed_logits(config: Any) -> str | None:
    """Return the setting by which a model caps or scales its logits: a probe's small logits may not show it."""
    for name, value in config.to_dict().items():
        if _OF_LOGITS.search(name) and "attn" not in name and value not in (None, False, 0, 1):
            return f"{name}={value}"
    return None


def _has_kernels(config: ModelConfig, device: torch.device) -> bool:
    """Whether kernels of variable length may serve: they compute in bf16, on a GPU."""
    return device.type == "cuda" and config.dtype == "bf16" and config.attention == "auto"


def _packing_applies(hf: Any) -> bool:
    """Whether packing can be right at all lengths: the probe's rows are too short to see a sliding window."""
    if attention_kinds(hf.config) != FULL_ATTENTION:
        log.info("%s has layers without full attention: rows are padded", type(hf).__name__)
        return False
    if hf.config._attn_implementation not in ("sdpa", "flash_attention_2", "flash_attention_3"):
        log.info("attention %r has no packed form: rows are padded", hf.config._attn_implementation)
        return False
    return True


def _pack(model: Model, read: Read[Model], expected: Tensor, *, kernels: bool, compiles: bool) -> Model:
    """Return the packed `model`, or the padded form where packing changes its outputs.

    `kernels`: try kernels of variable length first. `compiles`: with these, try compiled layers. Both must have the
    gradient of the plain form, too.
    """
    attention = model.attention
    packed = PACKED_ATTENTION if attention == "sdpa" else attention
    model.packed = False
    slope = None
    if kernels:
        try:
            slope = _gradient(model, read)
        except torch.OutOfMemoryError as error:
            log.info("no memory to compare kernels of variable length: %s", error)
            kernels = False
    model.packed = True
    for form in [VARLEN_ATTENTION, packed] if kernels else [packed]:
        model.hf.config._attn_implementation = form
        checked = slope if form == VARLEN_ATTENTION else None
        if _agrees(f"packing without padding ({form})", model, read, expected, checked):
            break
    else:
        model.hf.config._attn_implementation = attention
        model.packed = False
    if compiles and model.attention == VARLEN_ATTENTION and model.has_equal_layers:
        model.compile_layers()
        if not _agrees("compiling layers", model, read, expected, slope):
            model.run_layers_plainly()
    return model


def _probe(model: Model, read: Read[Model]) -> Tensor:
    """Return a model's outputs for two short rows."""
    device = next(model.parameters()).device
    ids = torch.arange(12) * 7 % min(model.vocab_size, 89) + 3
    ids = ids % model.vocab_size
    # Rows of different length with a common prompt: both padding and sharing of prompts are exercised.
    rows = [ids[:5], torch.cat([ids[:3], ids[5:]])]
    packing = model.pack(rows, [3, 3])
    predicting = [packing.token(torch.tensor(row), torch.arange(len(ids) - 1)) for row, ids in enumerate(rows)]
    select = torch.cat(predicting)
    labels = torch.cat([row[1:] for row in rows]).to(device)
    packing, select = packing.to(device), select.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=_in_bf16(model)), model.in_compiled_layers():
        return read(model, packing, select, labels)


@torch.enable_grad()
def _gradient(model: Model, read: Read[Model]) -> Tensor:
    """Return the gradient of the embedding for the probe's outputs; it comes through the backward of every layer."""
    # Of this parameter only: a whole gradient would take as much memory as the weights, which are not sharded yet.
    (made,) = torch.autograd.grad(_probe(model, read).float().sum(), [model.hf.get_input_embeddings().weight])
    return made


def _agrees(what: str, model: Model, read: Read[Model], expected: Tensor, gradient: Tensor | None = None) -> bool:
    """Whether the probe's outputs, and its gradient where one is given, are those of the plain form."""
    name = type(model.hf).__name__
    try:
        got = _probe(model, read).detach()
        slope = None if gradient is None else _gradient(model, read)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, ImportError, OSError) as error:
        log.info("%s does not work for %s (%s): falling back to the plain form", what, name, error)
        return False
    # Flash attention computes in bf16, which rounds log-probs by about 1e-2.
    tolerance = 5e-2 if _in_bf16(model) else 1e-4
    if not torch.allclose(got, expected, atol=tolerance, rtol=tolerance):
        worst = (got - expected).abs().max().item()
        log.info("%s is off by %.2g for %s: falling back to the plain form", what, worst, name)
        return False
    if slope is not None and gradient is not None:
        off = float((slope - gradient).norm() / gradient.norm())
        if not off < 2 * tolerance:
            log.info("%s has a gradient that is off by %.2g for %s: falling back to the plain form", what, off, name)
            return False
    return True


def _in_bf16(model: PackedModel) -> bool:
    """Whether the model's attention computes in bf16 only."""
    return model.attention == VARLEN_ATTENTION or model.attention.startswith("flash")
