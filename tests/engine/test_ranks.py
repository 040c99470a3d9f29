"""One rank in this process against two ranks on Ray: the same samples, the same loss, the same gradient."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from rlcore_grpo import GRPO, GRPOConfig, grpo_loss

from rlcore.config import ClusterConfig, Config, DataConfig, EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.micro_batch_size import measure, place_of
from rlcore.engine.worker import ModelWorker
from rlcore.engines.torch.config import TorchConfig
from rlcore.errors import DataError
from rlcore.plugins import Role
from rlcore.protocol import DataProto
from rlcore.roles.handles import PolicyHandle, StepClock
from rlcore.workers import ClassWithInitArgs, Dispatch, make_executor, register

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
ACTOR = Role(trains=True, generates=True)


class ProbedWorker(ModelWorker):
    """A model worker whose gradients, and numbers of tokens, can be looked at."""

    tokens: Sequence[int] = ()

    def log_probs(self, batch: DataProto, name: str, entropy: bool) -> DataProto:
        """See ModelWorker."""
        self.tokens = tokens_of(batch)
        return super().log_probs(batch, name, entropy)

    def update(self, items: Sequence[UpdateItem], epochs: int, step: int) -> dict[str, float]:
        """See ModelWorker."""
        self.tokens = tokens_of(items[0].batch)
        return super().update(items, epochs, step)

    @register(Dispatch.ONE_TO_ALL)
    def seen(self) -> Sequence[int]:
        """Return the numbers of tokens of the rows of this rank's last call."""
        return self.tokens

    @register(Dispatch.ONE_TO_ALL)
    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole gradient of every parameter."""
        parameters = self.train.parameters
        return {
            name: tensor.clone()
            for name, tensor in parameters.iter_full({name: p.grad for name, p in parameters.named_local()})
        }

    @register(Dispatch.ONE_TO_ALL)
    def measured(self) -> str:
        """Run the passes of a measurement, and return the layout that it would be kept for."""
        measure(self.train, lambda run: [run(), 0][1], 512)
        return place_of(self.train, "card").removeprefix("card, ").partition(" shard")[0]

    @register(Dispatch.ONE_TO_ALL)
    def draw(self) -> list[float]:
        """Return numbers from this rank's global random generator."""
        return torch.rand(3).tolist()

    @register(Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        """Return every parameter whole."""
        return {name: tensor.clone() for name, tensor in self.train.export(torch.float32)}


def tokens_of(batch: DataProto) -> list[int]:
    """Return how many tokens each row has."""
    return (batch.view("prompts").lengths + batch.view("responses").lengths).tolist()


@pytest.fixture(scope="module")
def actors(ray_cluster, engine_models, model_folder):
    """Handles of the same model on one rank in this process and on two ranks on Ray."""
    config = Config(
        algorithm="grpo",
        algo=GRPOConfig(kl_coef=0.1),
        model=ModelConfig(path=str(model_folder())),
        data=DataConfig(),
        rollout=RolloutConfig(response_len=12),
        engine=EngineConfig(lr=1e-3, clip_grad=0.0, micro_batch_rows=3),
    )
    setup = engine_models.role_setup(ACTOR, config.model, config.engine, config.rollout)
    import sys

    here = sys.modules[__name__]
    one = make_executor(ClusterConfig(executor="in_process", workers=1))
    two = make_executor(ClusterConfig(executor="ray", workers=2, inline_kb=0.0), by_value_modules=[here])
    with one, two:
        handles = []
        for executor in (one, two):
            group = executor.worker_group(
                executor.resource_pool(), ClassWithInitArgs(ProbedWorker, setup), name=f"actor{len(handles)}"
            )
            group.start()
            handles.append(PolicyHandle("actor", ACTOR, group, config, StepClock(step=1)))
        yield handles


@pytest.fixture
def fresh(actors, tmp_path_factory):
    """The two actors, with the weights and the version that they started with."""
    saved = tmp_path_factory.getbasetemp() / "start"
    if not saved.exists():
        actors[0].group.save_state(str(saved))
    for actor in actors:
        actor.group.load_state(str(saved))
    return actors


def same_update(actors, assert_close, batch, **options):
    metrics = [actor.update(batch, loss=grpo_loss, **options) for actor in actors]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-6)
    grads = [actor.group.gradients()[0] for actor in actors]
    assert_close(grads[1], grads[0])
    return metrics[0]


def prompts_of(batch):
    return batch.select(["prompts"], ["uid"])


def test_the_rollout_is_identical_and_comes_in_order(fresh, random_batch):
    prompts = prompts_of(random_batch(groups=5, size=3))
    one, two = (actor.generate(prompts) for actor in fresh)
    for name in ("responses", "response_mask"):
        assert one[name].equal(two[name])
    torch.testing.assert_close(one["rollout_log_probs"].values, two["rollout_log_probs"].values, rtol=1e-5, atol=1e-5)
    assert one["uid"].tolist() == two["uid"].tolist() == prompts["uid"].tolist()
    assert two["sample_index"].tolist() == [0, 1, 2] * 5


@pytest.mark.parametrize(
    ("groups", "size", "options"),
    [
        (4, 3, {"keep_together": "uid"}),
        (5, 3, {}),  # 15 rows: 7 and 8, so 3 micro-batches on each
        (3, 3, {"keep_together": "uid"}),  # 3 groups of 3: one rank has twice the work
        (1, 4, {"keep_together": "uid"}),  # one rank has no row at all
        (1, 1, {}),
    ],
)
def test_the_gradient_is_the_same(fresh, assert_close, random_batch, groups, size, options):
    same_update(fresh, assert_close, random_batch(groups, size), **options)


def test_mini_batches_and_epochs_are_the_same_steps(fresh, assert_close, random_batch):
    metrics = same_update(fresh, assert_close, random_batch(6, 2), keep_together="uid", mini_batches=3, epochs=2)
    assert metrics["train/optimizer_steps"] == 6
    weights = [actor.group.weights()[0] for actor in fresh]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=2e-5)


def test_no_rows_at_all_are_skipped_on_every_rank(fresh, random_batch):
    for actor in fresh:
        metrics = actor.update(random_batch()[:0], loss=grpo_loss)
        assert metrics["train/skipped_updates"] == 1
        assert actor.group.version() == [0] * actor.group.world_size


def test_log_probs_of_fewer_rows_than_ranks(fresh, random_batch):
    one, two = (actor.log_probs(random_batch(1, 1), entropy=True) for actor in fresh)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(two[name].values, one[name].values, rtol=1e-5, atol=1e-5)


def with_lengths(batch):
    batch["prompt_length"], batch["response_length"] = batch["prompts"].lengths, batch["responses"].lengths
    return batch


def test_ranks_get_rows_of_like_cost_and_results_come_in_the_callers_order(fresh, random_batch):
    """The three longest of eight rows come first; a row of n tokens costs n (12 * 48 + n)."""
    rows = with_lengths(random_batch(4, 2))
    rows = rows[torch.tensor(tokens_of(rows)).argsort(descending=True)]

    def costs(shares):
        return sorted(sum(n * (576 + n) for n in tokens) for tokens in shares)

    evenly = costs([tokens_of(rows)[:4], tokens_of(rows)[4:]])
    one, two = (actor.log_probs(rows)["log_probs"] for actor in fresh)
    assert two.lengths.tolist() == rows["responses"].lengths.tolist()
    torch.testing.assert_close(two.values, one.values, rtol=1e-4, atol=1e-5)
    seen = fresh[1].group.seen()
    assert sorted(n for tokens in seen for n in tokens) == sorted(tokens_of(rows))
    dealt = costs(seen)
    assert dealt[1] / dealt[0] < 1.1 < 1.3 < evenly[1] / evenly[0]
    assert fresh[0].group.seen() == [tokens_of(rows)], "with one rank nothing moves"
    fresh[1].log_probs(rows.select(["prompts", "responses"]))
    assert costs(fresh[1].group.seen()) == evenly, "without lengths rows are cut by their number"


def test_updates_of_balanced_ranks_are_the_same(fresh, assert_close, random_batch):
    """Three pairs of rows in each mini-batch; cut by their number, one rank has 30 tokens in all and the other 86."""
    batch = with_lengths(random_batch(6, 2, seed=4))
    options = {"keep_together": "uid", "mini_batches": 2}
    same_update(fresh, assert_close, batch, epochs=2, **options)
    assert [sum(tokens) for tokens in fresh[1].group.seen()] == [46, 70]
    batch.pop(["prompt_length"])
    fresh[1].update(batch, loss=grpo_loss, **options)
    assert [sum(tokens) for tokens in fresh[1].group.seen()] == [30, 86]


def test_balancing_reads_no_tokens_here(fresh, random_batch):
    actor = fresh[1]
    prompts = prompts_of(random_batch(4, 2))
    made = prompts.union(actor.generate(prompts))
    actor.group.fetched.clear()
    computed = actor.log_probs(made)
    actor.group.drain()
    assert set(actor.group.fetched) == {"prompt_length", "response_length"}
    assert computed["log_probs"].lengths.tolist() == made["response_length"].tolist()


def test_old_log_probs_come_from_the_rollout_only_where_they_are_the_same_numbers(fresh, random_batch, assert_close):
    for actor in fresh:
        batch = actor.generate(prompts_of(random_batch(3, 2)))
        assert actor.log_probs(batch, name="old_log_probs")["old_log_probs"].equal(batch["rollout_log_probs"])
        computed = actor.log_probs(batch, name="log_probs")["log_probs"]
        torch.testing.assert_close(computed.values, batch["rollout_log_probs"].values, rtol=1e-4, atol=1e-5)
        cut = actor.generate(prompts_of(random_batch(3, 2)), top_k=3)
        assert not actor.log_probs(cut, name="old_log_probs")["old_log_probs"].equal(cut["rollout_log_probs"])
        trained = random_batch(3, 2)
        actor.update(trained, loss=grpo_loss)
        assert not actor.log_probs(batch, name="old_log_probs")["old_log_probs"].equal(batch["rollout_log_probs"])


def test_generation_uses_the_weights_of_the_last_update(fresh, random_batch):
    prompts = prompts_of(random_batch(3, 2))
    for actor in fresh:
        before = actor.generate(prompts)
        assert before["weights_version"].tolist() == [0] * 6
        actor.update(random_batch(), loss=grpo_loss, epochs=4)
        after = actor.generate(prompts)
        assert after["weights_version"].tolist() == [4] * 6
        again = actor.log_probs(after, name="log_probs")["log_probs"]
        torch.testing.assert_close(again.values, after["rollout_log_probs"].values, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(fresh, random_batch):
    batch = random_batch(4, 3)
    advantages = batch["advantages"]
    advantages[10] = float("inf")
    batch["advantages"] = advantages
    for actor in fresh:
        with pytest.raises(DataError, match="uid=0:3 sample=1"):
            _ = actor.update(batch, loss=grpo_loss)["train/lr"]
        assert actor.group.version() == [0] * actor.group.world_size
        actor.update(random_batch(), loss=grpo_loss)  # and the ranks are still in step


def test_state_saved_by_two_ranks_goes_on_in_one_and_back(fresh, random_batch, tmp_path):
    one, two = fresh
    two.update(random_batch(seed=1), loss=grpo_loss)
    two.group.save_state(str(tmp_path / "two"))
    one.group.load_state(str(tmp_path / "two"))
    metrics = [actor.update(random_batch(seed=2), loss=grpo_loss) for actor in fresh]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-6)
    one.group.save_state(str(tmp_path / "one"))
    two.group.load_state(str(tmp_path / "one"))
    a, b = one.group.weights()[0], two.group.weights()[0]
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_every_rank_gets_its_random_state_back(fresh, tmp_path):
    _, two = fresh
    two.group.draw()
    two.group.save_state(str(tmp_path))
    went_on = two.group.draw()
    assert went_on[0] != went_on[1]
    two.group.load_state(str(tmp_path))
    assert two.group.draw() == went_on


def test_mini_batches_that_no_group_fills_are_skipped(fresh, random_batch):
    for actor in fresh:
        metrics = actor.update(random_batch(2, 2), loss=grpo_loss, keep_together="uid", mini_batches=3)
        assert (metrics["train/optimizer_steps"], metrics["train/skipped_updates"]) == (2, 1)


def test_measuring_a_micro_batch_leaves_no_trace_on_two_ranks(fresh, random_batch, assert_close):
    before = [actor.group.weights()[0] for actor in fresh]
    assert [actor.group.measured() for actor in fresh] == [["pp=1 tp=1 dp=1"], ["pp=1 tp=1 dp=2"] * 2]
    for actor, was in zip(fresh, before, strict=True):
        assert all(torch.equal(tensor, was[name]) for name, tensor in actor.group.weights()[0].items())
    same_update(fresh, assert_close, random_batch())


def test_other_layouts_on_two_ranks(ray_cluster, engine_models, model_folder, random_batch, assert_close):
    """Untied embeddings, padded rows, recomputed activations, layers sharded one by one; and the same model in bf16."""
    import sys

    model, engine = ModelConfig(path=str(model_folder("llama"))), EngineConfig(lr=1e-3, clip_grad=0.0)
    plain = engine_models.role_setup(ACTOR, model, engine, RolloutConfig(response_len=6))
    other = dataclasses.replace(
        plain, train_config=TorchConfig(padding_free=False, activation_checkpointing=True, layerwise_above=0)
    )
    half = dataclasses.replace(plain, model=dataclasses.replace(model, dtype="bf16"))
    config = Config(algorithm="grpo", algo=GRPOConfig(kl_coef=0.1))

    def handle(group):
        return PolicyHandle("actor", ACTOR, group, config, StepClock(step=1))

    one = make_executor(ClusterConfig(executor="in_process", workers=1))
    two = make_executor(ClusterConfig(executor="ray", workers=2), by_value_modules=[sys.modules[__name__]])
    with one, two:
        alone = one.worker_group(one.resource_pool(), ClassWithInitArgs(ProbedWorker, plain))
        classes = {name: ClassWithInitArgs(ProbedWorker, setup) for name, setup in (("other", other), ("half", half))}
        groups = two.worker_group(two.resource_pool(), classes, name="layouts")
        for group in (alone, *groups.values()):
            group.start()
        actors = [handle(alone), handle(groups["other"])]
        same_update(actors, assert_close, random_batch())
        prompts = prompts_of(random_batch())
        assert actors[0].generate(prompts)["responses"].equal(actors[1].generate(prompts)["responses"])
        in_bf16 = handle(groups["half"]).log_probs(random_batch())["log_probs"].values
        # The forward leaves gathered bf16 parameters behind; what is synced and saved are the fp32 ones.
        assert {tensor.dtype for tensor in groups["half"].weights()[0].values()} == {torch.float32}
        untrained = one.worker_group(one.resource_pool(), ClassWithInitArgs(ProbedWorker, plain))
        untrained.start()
        exact = handle(untrained).log_probs(random_batch())["log_probs"].values
        assert 1e-4 < (in_bf16 - exact).abs().max() < 0.3


def test_a_state_saved_after_a_forward_is_whole(fresh, random_batch, tmp_path):
    """Log-probs leave FSDP's root parameters gathered; their moments must be saved and loaded all the same."""
    from safetensors.torch import load_file

    one, two = fresh
    for actor in fresh:
        actor.update(random_batch(seed=1), loss=grpo_loss)
        actor.log_probs(random_batch(seed=2))
        actor.group.drain()
    one.group.save_state(str(tmp_path / "one"))
    two.group.save_state(str(tmp_path / "two"))
    moments = [
        {name for file in (tmp_path / actor / "optimizer").iterdir() for name in load_file(file)}
        for actor in ("one", "two")
    ]
    assert moments[0] == moments[1]
    for actor in fresh:
        actor.log_probs(random_batch(seed=2))
        actor.group.load_state(str(tmp_path / "two"))
    metrics = [actor.update(random_batch(seed=3), loss=grpo_loss) for actor in fresh]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-6)


def test_roles_say_what_they_cannot_do(fresh, random_batch):
    frozen = dataclasses.replace(ACTOR, trains=False, generates=False)
    handle = PolicyHandle("ref", frozen, fresh[0].group, fresh[0]._config, StepClock())
    with pytest.raises(DataError, match="'ref' is frozen; declare it with Role"):
        handle.update(random_batch(), loss=grpo_loss)
    with pytest.raises(DataError, match="'ref' does not generate"):
        handle.generate(random_batch())
    wrong = random_batch()
    wrong["advantages"] = wrong["advantages"].double()
    with pytest.raises(DataError, match=r"column 'advantages' is .*; the glossary says"):
        fresh[0].update(wrong, loss=grpo_loss)
    with pytest.raises(DataError, match=r"update\(epochs=0\): it must be at least 1"):
        fresh[0].update(random_batch(), loss=grpo_loss, epochs=0)
    with pytest.raises(DataError, match=r"constants=\{'advantages'.*a column of this name"):
        fresh[0].update(random_batch(), loss=grpo_loss, constants={"advantages": 1.0})
    with pytest.raises(DataError, match=r"constants=\{'tau': nan\}.*a finite number"):
        fresh[0].update(random_batch(), loss=grpo_loss, constants={"tau": float("nan")})
    with pytest.raises(DataError, match="needs a loss"):
        fresh[0].update(random_batch())
    with pytest.raises(DataError, match="unexpected keyword argument 'heat'"):
        fresh[0].generate(random_batch(), heat=2)


def test_grpo_asks_for_a_reference_only_when_it_is_used():
    assert set(GRPO(GRPOConfig(kl_coef=0.1)).roles()) == {"actor", "ref"}
    assert set(GRPO(GRPOConfig(kl_coef=0.0)).roles()) == {"actor"}
