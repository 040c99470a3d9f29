"""The models' seconds and bytes, by hand: a device of round numbers, and a decoder that can be counted."""

from dataclasses import replace

import pytest
from rlcore_plugin_plan import memory
from rlcore_plugin_plan.dataflow import Call
from rlcore_plugin_plan.generation import generate_seconds, step_seconds, transition_seconds
from rlcore_plugin_plan.inference import forward_seconds, weights_seconds
from rlcore_plugin_plan.model_size import ModelSize, size_of
from rlcore_plugin_plan.profile import Profile, dump, load, parse, shipped
from rlcore_plugin_plan.training import update_seconds
from rlcore_plugin_plan.workload import Lengths, Workload

from rlcore.engine import Layout
from rlcore.engine.weights.generation import GenerationLayout
from rlcore.errors import ConfigError

# A tenth of a TFLOP/s, 10 GB/s of memory, links of 1 GB/s and no latencies or host times.
ROUND = Profile(
    name="round",
    per_machine=4,
    memory=1e9,
    usable=1.0,
    flops_bf16=1e11,
    flops_fp32=1e11,
    training=0.5,
    forward=1.0,
    decoding=1.0,
    bandwidth=1e10,
    bandwidth_share=1.0,
    link=1e9,
    link_latency=0.0,
    network=4e8,
    network_latency=0.0,
    overlap=0.0,
    layer_seconds=0.0,
    decode_layer_seconds=0.0,
    decode_step_seconds=0.0,
    decode_row_seconds=0.0,
    optimizer_seconds=0.0,
    call_seconds=0.0,
    transition_seconds=0.0,
    pipeline_seconds=0.0,
    dollars=1.0,
)
# 4 layers of 1e6 parameters; attention of one head of 10, a vocabulary of 100 on a width of 10.
SIZE = ModelSize(4, 10, 10**6, 1, 1, 10, 100, tied=True)
WORK = Workload(prompts=8, lengths=Lengths(60, (40,)), dtype_bytes=4, micro_batch_tokens=0)
ROWS = Call("actor", "log_probs", 1, prompts=1)
UPDATE = Call("actor", "update", 1)

# 800 tokens, each 2e6 + 4 * 10 * 50 operations a layer; a head of 2 * 10 * 100 on 320 of them.
FORWARD = 800 * 4 * (2e6 + 2000) + 320 * 2000
PARAMETERS = 4e6 + 1000


def test_a_forward_is_its_operations():
    assert forward_seconds(SIZE, Layout(), ROWS, WORK, ROUND) == pytest.approx(FORWARD / 1e11)
    halves = forward_seconds(SIZE, Layout(dp=2), ROWS, replace(WORK, shard=1), ROUND)
    assert halves == pytest.approx(FORWARD / 2 / 1e11)


def test_a_forward_of_few_tokens_is_reading_the_weights():
    one = replace(WORK, prompts=1, lengths=Lengths(1, (1,)))
    slow = replace(ROUND, bandwidth=1e8)
    assert forward_seconds(SIZE, Layout(), ROWS, one, slow) == pytest.approx(4 * PARAMETERS / 1e8)


def test_an_update_is_three_forwards_and_28_bytes_a_parameter():
    step = 28 * PARAMETERS / 1e10
    assert update_seconds(SIZE, Layout(), UPDATE, WORK, ROUND) == pytest.approx(3 * FORWARD / 5e10 + step)
    again = replace(UPDATE, epochs=2, mini_batches=4)
    assert update_seconds(SIZE, Layout(), again, WORK, ROUND) == pytest.approx(2 * (3 * FORWARD / 5e10 + 4 * step))
    recomputed = update_seconds(SIZE, Layout(), UPDATE, replace(WORK, recompute=True), ROUND)
    assert recomputed == pytest.approx(4 * FORWARD / 5e10 + step)


def test_prompts_that_stand_once_for_their_samples():
    # 8 prompts of 60 tokens, 4 responses of 40 to each; a row's 100 tokens each see 50 others all the same.
    group = Call("actor", "log_probs", 4, prompts=1)
    tokens = 8 * 60 + 32 * 40
    once = (4 * (tokens * 2e6 + 3200 * 2000) + 4 * 320 * 2000) / 1e11
    assert forward_seconds(SIZE, Layout(), group, WORK, ROUND) == pytest.approx(once)
    # Half of the rows have a prompt's first, second, third or fourth row in 15 of 16 cases.
    halves = forward_seconds(SIZE, Layout(dp=2), group, replace(WORK, shard=1), ROUND)
    tokens = 8 * 15 / 16 * 60 + 16 * 40
    assert halves == pytest.approx((4 * (tokens * 2e6 + 1600 * 2000) + 2 * 320 * 2000) / 1e11)
    kept = forward_seconds(SIZE, Layout(dp=2), replace(group, together=True), replace(WORK, shard=1), ROUND)
    assert kept == pytest.approx(once / 2)
    # Kernels for variable lengths, and padded rows, take every row whole.
    whole = 4 * FORWARD / 1e11
    bf16 = replace(WORK, dtype_bytes=2)
    for work in (replace(WORK, padding_free=False), replace(WORK, attention="flash_attention_2"), bf16):
        assert forward_seconds(SIZE, Layout(), group, work, ROUND) == pytest.approx(whole)
    for work, profile in ((bf16, replace(ROUND, cpu=True)), (replace(bf16, attention="sdpa"), ROUND)):
        assert forward_seconds(SIZE, Layout(), group, work, profile) == pytest.approx(once)


def test_host_time_adds_on_a_core_and_hides_behind_a_gpu():
    host = replace(ROUND, layer_seconds=0.01)
    alone = FORWARD / 1e11
    assert forward_seconds(SIZE, Layout(), ROWS, WORK, replace(host, cpu=True)) == pytest.approx(alone + 0.04)
    assert forward_seconds(SIZE, Layout(), ROWS, WORK, host) == pytest.approx(alone)
    slow = replace(host, layer_seconds=1.0)
    assert forward_seconds(SIZE, Layout(), ROWS, WORK, slow) == pytest.approx(4.0)


def test_sharded_weights_are_gathered_and_gradients_scattered():
    # Half of 4 bytes a parameter to each of two places over 1 GB/s, and as much of gradients.
    moved = 2 * (4 * PARAMETERS / 2) / 1e9
    compute = 3 * FORWARD / 2 / 5e10
    step = 28 * PARAMETERS / 2 / 1e10 + 6 * 500 / 1e9
    work = replace(WORK, shard=0)
    assert update_seconds(SIZE, Layout(dp=2), UPDATE, work, ROUND) == pytest.approx(compute + moved + step)
    hidden = update_seconds(SIZE, Layout(dp=2), UPDATE, work, replace(ROUND, overlap=1.0))
    assert hidden == pytest.approx(compute + step)
    # Layer by layer they are gathered again for the backward, in each of 4 micro-batches of one row.
    rows = replace(work, micro_batch_rows=1, layerwise_above=0)
    often = 4 * 3 * (4 * PARAMETERS / 2) / 1e9
    assert update_seconds(SIZE, Layout(dp=2), UPDATE, rows, ROUND) == pytest.approx(compute + often + step)


def test_tensor_shards_reduce_four_times_a_layer():
    reduced = 4 * 4 * 2 * (800 * 10 * 4 / 2) / 1e9
    layers = 3 * 800 * 4 * (2e6 + 2000) / 2 / 5e10
    head = 3 * 320 * 2000 / 5e10
    step = 28 * PARAMETERS / 2 / 1e10 + 6 * 500 / 1e9
    seconds = update_seconds(SIZE, Layout(tp=2), UPDATE, WORK, ROUND)
    assert seconds == pytest.approx(layers + head + reduced + step, rel=1e-4)


def test_a_pipeline_has_a_bubble():
    # 8 rows in 4 micro-batches on 2 stages: 5 turns of the second stage, which has the head, and of what it sends.
    work = replace(WORK, micro_batch_rows=2)
    turn = (200 * 2 * (2e6 + 2000) + 80 * 2000) / 1e11
    sent = 200 * 10 * 4 / 1e9
    assert forward_seconds(SIZE, Layout(pp=2), ROWS, work, ROUND) == pytest.approx(5 * (turn + sent))


def test_gathers_inside_a_machine_and_over_the_network():
    assert ROUND.gather_seconds(1e9, 4, 1) == pytest.approx(0.75)
    # 8 ranks next to each other: all four links of a machine lead over its one network of 0.4 GB/s.
    assert ROUND.gather_seconds(1e9, 8, 1) == pytest.approx(7 / 8 / 0.4)
    # 2 ranks a machine apart: three other such pairs use the network too.
    assert ROUND.gather_seconds(1e9, 2, 4) == pytest.approx(0.5 / 0.1)
    assert ROUND.reduce_seconds(1e9, 4, 1) == pytest.approx(1.5)
    late = replace(ROUND, link_latency=0.1, network_latency=0.2)
    assert late.gather_seconds(1e9, 4, 1) == pytest.approx(0.75 + 2 * 0.1)
    assert late.gather_seconds(1e9, 8, 1) == pytest.approx(7 / 8 / 0.4 + 3 * 0.2)


def test_a_decoding_step_reads_weights_keys_and_values():
    # Of each token 2 * 4 layers * 10 elements of keys and values a token.
    nbytes = 4 * (PARAMETERS + 80 * 8 * 100)
    alone = GenerationLayout(Layout())
    slow = replace(ROUND, bandwidth=1e8)
    assert step_seconds(SIZE, alone, 8, 100, WORK, slow) == pytest.approx(nbytes / 1e8)
    halves = GenerationLayout(Layout(tp=2), tp=2)
    # Two all-reduces a layer, each twice half of 8 rows.
    messages = 8 * 2 * (8 * 10 * 4 / 2) / 1e9
    assert step_seconds(SIZE, halves, 8, 100, WORK, slow) == pytest.approx(nbytes / 2 / 1e8 + messages)
    by_row = replace(slow, decode_row_seconds=0.1, decode_step_seconds=0.5)
    assert step_seconds(SIZE, alone, 8, 100, WORK, by_row) == pytest.approx(1.3)


def test_rows_that_do_not_fit_at_once_take_rounds():
    by_step = replace(ROUND, decode_step_seconds=1.0, cpu=True)
    alone, sample = GenerationLayout(Layout()), Call("actor", "generate", 1, prompts=1)
    once = generate_seconds(SIZE, alone, sample, WORK, 8, by_step)
    assert once == pytest.approx(40, rel=0.05)
    assert generate_seconds(SIZE, alone, sample, WORK, 3, by_step) == pytest.approx(3 * 40, rel=0.05)
    continuous = replace(WORK, continuous=True)
    assert generate_seconds(SIZE, alone, sample, continuous, 3, by_step) == pytest.approx(8 / 3 * 40, rel=0.05)
    shorter = replace(WORK, lengths=Lengths(60, (10, 10, 10, 40)))
    # The longest still takes 40 steps with a chance of 1 - 0.75^8.
    seconds = generate_seconds(SIZE, alone, sample, shorter, 8, by_step)
    assert seconds == pytest.approx(10 + 30 * (1 - 0.75**8), rel=0.05)


def test_the_transition_is_table_2():
    # (t p - t_g p_g) / (t_g p_g t p) M inside micro-DP groups: from 1-4-1 to t_g = 2, a quarter of M.
    slow = replace(ROUND, bandwidth=1e30)
    whole = 4 * PARAMETERS
    assert transition_seconds(SIZE, GenerationLayout(Layout(tp=4), tp=2), WORK, slow) == pytest.approx(whole / 4 / 1e9)
    both = transition_seconds(SIZE, GenerationLayout(Layout(tp=2, dp=2), tp=1), WORK, slow)
    assert both == pytest.approx(whole / 2 / 1e9 + whole / 4 / 1e9)  # and (d - 1) / (t p d) M along dp
    assert transition_seconds(SIZE, GenerationLayout(Layout()), WORK, ROUND) == 0
    copies = GenerationLayout(Layout(dp=2))
    assert transition_seconds(SIZE, copies, replace(WORK, shard=1), ROUND) == 0
    assert transition_seconds(SIZE, copies, WORK, ROUND) > 0


def test_weights_of_another_role():
    assert weights_seconds(SIZE, Layout(dp=2), ROUND, apart=False) == pytest.approx(12 * PARAMETERS / 2 / 1e10)
    assert weights_seconds(SIZE, Layout(), ROUND, apart=True) == pytest.approx(4 * PARAMETERS / 4e8)


def test_memory_of_a_role():
    held = memory.role_held(SIZE, Layout(), True, (), WORK)
    assert (held.resident, held.working) == (pytest.approx(16 * PARAMETERS), 0)
    frozen = memory.role_held(SIZE, Layout(dp=4), False, (), WORK)
    assert frozen.resident == pytest.approx(4 * PARAMETERS / 4)
    # Embeddings are whole on each tensor shard.
    shards = memory.role_held(SIZE, Layout(tp=2), True, (), WORK)
    assert shards.resident == pytest.approx(16 * (2e6 + 1000))
    # 800 tokens of 10 numbers, 34 bytes each at two bytes, doubled, in 4 layers; logits of 100, three times.
    working = memory.role_held(SIZE, Layout(), True, (UPDATE,), WORK).working
    assert working == pytest.approx(800 * 10 * 34 * 2 * 4 + 3 * 4 * 800 * 100)
    sampling = GenerationLayout(Layout(tp=2), tp=2)
    assert memory.generating_bytes(SIZE, sampling, WORK) == pytest.approx(4 * (2e6 + 1000))
    assert memory.generating_bytes(SIZE, GenerationLayout(Layout()), WORK) == 0
    in_bf16 = memory.generating_bytes(SIZE, GenerationLayout(Layout()), replace(WORK, dtype_bytes=2))
    assert in_bf16 == 2 * (SIZE.layers * SIZE.layer + SIZE.vocab * SIZE.hidden), "the layers and the head, rounded"
    copies = GenerationLayout(Layout(dp=2))
    assert memory.generating_bytes(SIZE, copies, replace(WORK, shard=1)) == 0
    assert memory.generating_bytes(SIZE, copies, WORK) == pytest.approx(4 * PARAMETERS)
    assert memory.cache_bytes(SIZE, GenerationLayout(Layout()), WORK) == 4 * 80 * 100


def test_a_frozen_bf16_role_holds_two_bytes_a_parameter():
    bf16 = replace(WORK, dtype_bytes=2)
    # Whole, the embeddings of 1,000 parameters stay in fp32; sharded over two places, everything is rounded.
    whole = memory.role_held(SIZE, Layout(), False, (ROWS,), bf16, frozen=True)
    assert whole.resident == pytest.approx(2 * 4e6 + 4 * 1000)
    # 800 tokens of 10 numbers, 34 bytes each, in the one layer that is under way, and its output; logits of 100 thrice.
    assert whole.working == pytest.approx(2 * 800 * 10 * 34 + 3 * 4 * 800 * 100)
    shared = memory.role_held(SIZE, Layout(dp=2), False, (ROWS,), bf16, frozen=True)
    assert shared.resident == pytest.approx(2 * PARAMETERS / 2)
    # What another role follows, or samples with, keeps fp32, and each forward rounds it once more.
    kept = memory.role_held(SIZE, Layout(), False, (ROWS,), bf16)
    assert kept.resident == pytest.approx(4 * PARAMETERS)
    assert kept.working - whole.working == pytest.approx(2 * PARAMETERS)
    assert memory.role_held(SIZE, Layout(), False, (), WORK, frozen=True).resident == pytest.approx(4 * PARAMETERS)


def test_sampling_is_counted_by_what_the_engine_can_do():
    alone, slow = GenerationLayout(Layout()), replace(ROUND, bandwidth=1e30)
    # Rows of 60 + 10 and 60 + 40 tokens, 80 elements of 4 bytes each: room for the longest, or for the mean.
    uneven = replace(WORK, lengths=Lengths(60, (10, 40)), continuous=True)
    assert memory.cache_bytes(SIZE, alone, uneven) == 4 * 80 * 100
    assert memory.cache_bytes(SIZE, alone, replace(uneven, pooled_cache=True)) == 4 * 80 * 85
    # The trained module serves an engine that can share it, however its rows are admitted.
    assert memory.generating_bytes(SIZE, alone, uneven) == 0
    assert transition_seconds(SIZE, alone, uneven, slow) == 0
    copied = replace(uneven, shares_module=False)
    assert memory.generating_bytes(SIZE, alone, copied) == pytest.approx(4 * PARAMETERS)
    assert transition_seconds(SIZE, alone, copied, ROUND) == pytest.approx(2 * 4 * PARAMETERS / 1e10)
    # A pool that only samples has no trained module.
    assert memory.generating_bytes(SIZE, alone, uneven, apart=True) == pytest.approx(4 * PARAMETERS)


def test_lengths():
    lengths = Lengths(10, (5, 20, 20, 5))
    assert (lengths.response, lengths.most, lengths.row) == (12.5, 20, 22.5)
    assert lengths.runs == ((0, 5, 1.0), (5, 20, 0.5))
    assert lengths.context == pytest.approx((15**2 + 30**2) / 2 / 45)


def test_a_models_size_is_that_of_its_config():
    from transformers import AutoModelForCausalLM

    from rlcore.assets import TINY

    size = size_of("tiny")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    # The last norm counts as a part of the layers, in whole numbers.
    assert size.parameters == pytest.approx(sum(parameter.numel() for parameter in model.parameters()), abs=3)
    assert (size.layers, size.hidden, size.heads, size.kv_heads, size.vocab, size.tied) == (3, 128, 4, 2, 320, True)
    assert size_of("tiny", head="number").head_flops(1) == 2 * 128
    with pytest.raises(ConfigError, match=r"config\.json cannot be read, and a plan needs it"):
        size_of("/nowhere")


def test_profiles_have_a_source_for_every_figure(tmp_path):
    import yaml

    assert set(shipped()) == {"a100-80g", "h100", "h200", "cpu"}
    for name in shipped():
        profile = load(name)
        assert all(len(source) > 5 for source in profile.sources.values())
        assert parse(yaml.safe_load(dump(profile)), name) == profile
    with pytest.raises(ConfigError, match=r"'h10' is not a device profile. Did you mean 'h100'\?"):
        load("h10")
    file = tmp_path / "mine.yaml"
    file.write_text(dump(load("h100")).replace("link_latency", "link_delay"))
    with pytest.raises(ConfigError, match=r"unknown figure 'link_delay'\. Did you mean 'link_latency'"):
        load(str(file))
    file.write_text("name: mine\nfigures: {memory: {value: 1}}")
    with pytest.raises(ConfigError, match=r"must be \{value: NUMBER, source: TEXT\}"):
        load(str(file))
