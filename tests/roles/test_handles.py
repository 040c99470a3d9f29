"""Critics, reward models and followers on two ranks on Ray, against one rank in this process."""

import dataclasses
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlcore.config import ClusterConfig, Config, EngineConfig, ModelConfig, RolloutConfig
from rlcore.engine.worker import ModelWorker
from rlcore.ops import masked_sum, needs, objective
from rlcore.plugins import CRITIC, REWARD, Role
from rlcore.roles.handles import HANDLES, StepClock
from rlcore.workers import ClassWithInitArgs, Dispatch, make_executor, register

pytestmark = pytest.mark.ray
ROLES = {
    "critic": Role(trains=True, kind=CRITIC),
    "reward_model": Role(trains=True, kind=REWARD),
    "target": Role(kind=CRITIC, follows="critic"),
}


class ProbedWorker(ModelWorker):
    """A model worker whose gradients and weights can be looked at."""

    @register(Dispatch.ONE_TO_ALL)
    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole gradient of every parameter."""
        parameters = self.train.parameters
        return {
            name: tensor.clone()
            for name, tensor in parameters.iter_full({name: p.grad for name, p in parameters.named_local()})
        }

    @register(Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        """Return every parameter whole."""
        return {name: tensor.clone() for name, tensor in self.train.export(torch.float32)}


@needs("values")
def value_loss(out, batch, config):
    error = (out.values - batch["advantages"][:, None]) ** 2
    return {"value": objective(masked_sum(error, batch["response_mask"]), batch["response_mask"].sum())}


@needs("scores")
def score_loss(out, batch, config):
    return {"score": objective(((out.scores - batch["advantages"]) ** 2).sum(), len(out.scores))}


@pytest.fixture(scope="module")
def roles(ray_cluster, engine_models, model_folder, tmp_path_factory):
    """The same roles, by name, on one rank in this process and on two ranks on Ray."""
    folder = tmp_path_factory.mktemp("scored")
    shutil.copytree(model_folder(), folder, dirs_exist_ok=True)
    hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(hf.score.weight, generator=torch.Generator().manual_seed(7))
    hf.save_pretrained(folder)
    config = Config(algorithm="", algo=None, model=ModelConfig(path=str(folder)))
    engine = EngineConfig(lr=1e-2, clip_grad=0.0, micro_batch_rows=3)
    plain = engine_models.role_setup(Role(), config.model, engine, RolloutConfig())
    classes = {
        name: ClassWithInitArgs(ProbedWorker, dataclasses.replace(plain, role=role)) for name, role in ROLES.items()
    }
    one = make_executor(ClusterConfig(executor="in_process", workers=1))
    two = make_executor(ClusterConfig(executor="ray", workers=2), by_value_modules=[sys.modules[__name__]])
    with one, two:
        handles = []
        for executor in (one, two):
            groups = executor.worker_group(executor.resource_pool(), classes, name="roles")
            for group in groups.values():
                group.start()
            clock = StepClock(step=1)
            handles.append(
                {name: HANDLES[ROLES[name].kind](name, ROLES[name], groups[name], config, clock) for name in ROLES}
            )
        yield handles


@pytest.mark.parametrize(("groups", "size"), [(4, 3), (1, 1)])
def test_values_scores_and_gradients_are_the_same(roles, random_batch, assert_close, groups, size):
    """12 rows in 2 micro-batches on each rank; and one row, so that a rank has none."""
    batch = random_batch(groups, size, seed=5)
    values, scores, metrics, gradients = [], [], [], []
    for side in roles:
        values.append(side["critic"].values(batch)["values"])
        scores.append(side["reward_model"].score(batch)["scores"])
        for name, loss in (("critic", value_loss), ("reward_model", score_loss)):
            metrics.append(side[name].update(batch, loss=loss))
            gradients.append(side[name].group.gradients()[0])
    assert scores[0].abs().min() > 0
    torch.testing.assert_close(values[1].values, values[0].values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-4)
    for index in (0, 1):
        assert metrics[2 + index] == pytest.approx(metrics[index], rel=1e-4, abs=1e-6)
        assert_close(gradients[2 + index], gradients[index], 1e-4)


def test_followers_copy_or_average_and_are_saved_whole(roles, random_batch, tmp_path):
    """After a forward, which leaves gathered parameters behind: half of the way, saved and loaded, then all of it."""
    batch = random_batch(2, 2)
    for number, side in enumerate(roles):
        critic, target = side["critic"], side["target"]
        critic.update(batch, loss=value_loss)
        for role in (critic, target):
            role.values(batch)
        theirs, mine = critic.group.weights()[0], target.group.weights()[0]
        assert any(not torch.equal(theirs[name], mine[name]) for name in mine)
        target.follow(0.5)
        middle = target.group.weights()[0]
        for name in mine:
            torch.testing.assert_close(middle[name], (mine[name] + theirs[name]) / 2)
        target.group.save_state(str(tmp_path / str(number)))
        target.follow()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in target.group.weights()[0].items())
        assert target.values(batch)["values"].equal(critic.values(batch)["values"])
        target.group.load_state(str(tmp_path / str(number)))
        assert all(torch.equal(tensor, middle[name]) for name, tensor in target.group.weights()[0].items())
