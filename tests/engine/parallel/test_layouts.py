"""Which layouts a model can take: refused before anything starts, with those that it can."""

import dataclasses
import pickle

import pytest
import torch
from rlcore_grpo import GRPOConfig, grpo_loss

from rlcore.config import ClusterConfig, Config, EngineConfig, ModelConfig
from rlcore.engine.collectives import Ranks
from rlcore.engine.parallel.layout import Layout
from rlcore.engine.parallel.model_shape import FULL_ATTENTION, attention_kinds, check_model_layout, layout_of
from rlcore.engine.train import TrainSetup
from rlcore.engine.update.items import UpdateItem
from rlcore.engine.update.microbatch import micro_batches
from rlcore.engines.torch.config import TorchConfig, check_layout
from rlcore.engines.torch.engine import TorchEngine
from rlcore.engines.torch.packing import Packing
from rlcore.engines.torch.pipeline import stage_of_layer
from rlcore.engines.torch.plugin import rlcore_train_engines
from rlcore.errors import ConfigError
from rlcore.plugins import REWARD, Role
from rlcore.roles.placement import plan_pools


def check(folder, workers, **engine):
    config = EngineConfig(**engine)
    check_model_layout(ModelConfig(path=str(folder)), layout_of(config, workers))


def test_the_rest_of_the_workers_are_data_parallel():
    assert layout_of(EngineConfig(pp=2, tp=2), 12) == Layout(pp=2, tp=2, dp=3)
    assert layout_of(EngineConfig(), 4) == Layout(dp=4)


@pytest.mark.parametrize(
    ("engine", "workers", "message"),
    [
        ({"tp": 2}, 3, "engine.pp=1, engine.tp=2 does not fit 3 workers.* Set cluster.workers=2"),
        ({"pp": 2, "tp": 2}, 2, "engine.tp=2 does not fit 2 workers.* Set cluster.workers=4"),
    ],
)
def test_a_layout_that_does_not_fit_the_workers_is_refused(engine, workers, message):
    with pytest.raises(ConfigError, match=message):
        layout_of(EngineConfig(**engine), workers)


CAN = "With 4 workers it can use: pp=1 tp=1 dp=4; pp=1 tp=2 dp=2; pp=2 tp=1 dp=2; pp=2 tp=2 dp=1$"


@pytest.mark.parametrize(
    ("kind", "engine", "message"),
    [
        ("qwen2", {"tp": 4}, f"tp=4 does not divide its num_key_value_heads=2.* {CAN}"),
        ("qwen3", {"pp": 4}, rf"pp=4 needs more layers than its 2.* {CAN}"),
        ("gpt2", {"tp": 2}, "no tensor-parallel plan.* it can use: pp=1 tp=1 dp=4$"),
        ("mistral-window", {"pp": 2}, "full attention.* it can use: pp=1 tp=1 dp=4; pp=1 tp=2 dp=2$"),
    ],
)
def test_a_layout_that_the_model_cannot_take_is_refused(model_folder, kind, engine, message):
    with pytest.raises(ConfigError, match=message):
        check(model_folder(kind), 4, **engine)


def test_a_folder_that_cannot_be_read_here_is_left_to_the_workers(tmp_path):
    check(tmp_path, 4, tp=4)


@pytest.mark.parametrize(
    ("own", "layout", "message"),
    [
        ({"padding_free": False}, Layout(pp=2), r"engine.pp=2 needs engine.torch.padding_free=true"),
        ({"shard": 4}, Layout(dp=6), r"engine.torch.shard=4 does not divide the 6 .* ranks; allowed: 0, 1, 2, 3, 6$"),
    ],
)
def test_a_layout_that_the_engines_own_config_does_not_fit_is_refused(own, layout, message):
    with pytest.raises(ConfigError, match=message):
        check_layout(TorchConfig(**own), layout)
    config = Config(algorithm="", algo=None, engine=EngineConfig(name="torch", pp=layout.pp))
    config = dataclasses.replace(
        config, cluster=ClusterConfig(workers=layout.world_size), sections={"engine.torch": TorchConfig(**own)}
    )
    with pytest.raises(ConfigError, match=message):
        plan_pools(config, {"actor": Role(trains=True)}, {"torch": rlcore_train_engines()})


def test_the_run_is_refused_before_its_workers_start(model_folder):
    roles = {"actor": Role(trains=True, generates=True), "judge": Role(kind=REWARD, model=str(model_folder("gpt2")))}
    config = Config(
        algorithm="",
        algo=None,
        model=ModelConfig(path=str(model_folder())),
        engine=EngineConfig(tp=2),
        cluster=ClusterConfig(workers=2),
    )
    with pytest.raises(ConfigError, match=r"pool main, judge: model '.*gpt2.*' cannot be trained"):
        plan_pools(config, roles)
    assert plan_pools(config, {"actor": roles["actor"]})[0].workers == 2


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("LlamaConfig", {}, FULL_ATTENTION),
        ("Qwen2Config", {"sliding_window": 4}, FULL_ATTENTION),
        (
            "Qwen2Config",
            {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0},
            {"sliding_attention"},
        ),
        ("Qwen2Config", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, None),
        ("MistralConfig", {"sliding_window": 4}, {"sliding_attention"}),
        ("MistralConfig", {"sliding_window": None}, FULL_ATTENTION),
        ("Gemma2Config", {}, None),
    ],
)
def test_the_kinds_of_attention_of_a_model(name, options, kinds):
    """Of all its layers together: None stands for a mixture of full and sliding attention."""
    import transformers

    config = getattr(transformers, name)(num_hidden_layers=2, **options)
    assert attention_kinds(config) == (kinds or {"full_attention", "sliding_attention"})


def test_stages_differ_by_one_layer_at_most():
    assert stage_of_layer(7, 3) == [0, 0, 0, 1, 1, 2, 2]


def test_a_pipeline_gets_a_micro_batch_for_each_stage():
    lengths = [5, 9, 3, 8, 2, 7]
    cut = micro_batches(lengths, None, 0, 0, at_least=3)
    assert len(cut) >= 3
    assert sorted(row for rows in cut for row in rows) == list(range(6))
    pairs = micro_batches(lengths, ["a", "a", "b", "b", "c", "c"], 0, 0, at_least=3)
    assert sorted(map(sorted, pairs)) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batches([4], None, 0, 0, at_least=3) == [[0]]
    assert micro_batches([], None, 0, 0, at_least=3) == []


def test_filling_up_leaves_the_rows_as_they_are():
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    filled = Packing.of(rows, total=9)
    assert filled.input_ids.tolist() == [5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert filled.lengths.tolist() == [3, 1, 3, 2]
    assert [part.longest for part in filled.parts] == [3]


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickled_file_in_a_checkpoint_is_not_opened(model_folder, random_batch, tmp_path):
    """`.metadata` is what torch's default reader unpickles."""
    config = ModelConfig(path=str(model_folder()))
    engine = TorchEngine(TrainSetup(config, EngineConfig(lr=1e-3), TorchConfig(), ranks=Ranks(), trains=True))
    batch = random_batch()
    engine.update([UpdateItem(batch, [len(batch)], grpo_loss, GRPOConfig(kl_coef=0.1))], epochs=1, step=0)
    engine.save(tmp_path / "state")
    exploded = tmp_path / "exploded"
    for folder in (tmp_path / "state", tmp_path / "state" / "model", tmp_path / "state" / "optimizer"):
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb(str(exploded))))
    engine.restore(tmp_path / "state")
    assert engine.version == 1
    assert not exploded.exists()
    pickle.loads((tmp_path / "state" / ".metadata").read_bytes()).close()
    assert exploded.exists(), "the file would have shown itself"
