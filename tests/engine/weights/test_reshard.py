"""Eight gloo processes reshard under many layouts: right bit for bit, and as costly as HybridFlow's Table 2 says."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from rlcore.engine.parallel.layout import Layout
from rlcore.engine.weights.generation import GenerationLayout

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]
STRATEGIES = ("hybridflow", "model_parallel", "all_ranks")
WORLD, UPDATES = 8, 3
WIDTH = 96
LAYER = 4 * WIDTH * (WIDTH + 1 + WIDTH // 2 + WIDTH // 2 + WIDTH + 3 * 3 * WIDTH)
"""Bytes in fp32 of what tensor ranks divide of one layer (see ranks.py)."""
M = 4 * LAYER
TABLE_2 = {
    # p, t, d, p_g, t_g: received by HybridFlow, HybridFlow-V, DS-Chat; HybridFlow's peak; as shares of M, by hand
    (1, 8, 1, 1, 2): ("3/8", "7/8", "7/8", "1/2"),
    (1, 8, 1, 1, 1): ("7/8", "7/8", "7/8", "1"),
    (1, 8, 1, 1, 8): ("0", "7/8", "7/8", "1/8"),
    (1, 4, 2, 1, 2): ("1/4", "3/4", "7/8", "1/2"),
    (1, 2, 4, 1, 1): ("1/2", "1/2", "7/8", "1"),
    (2, 4, 1, 2, 2): ("1/8", "7/8", "7/8", "1/4"),
    (2, 4, 1, 1, 2): ("3/8", "7/8", "7/8", "1/2"),
    (2, 2, 2, 1, 1): ("3/4", "3/4", "7/8", "1"),
    (4, 2, 1, 2, 1): ("3/8", "7/8", "7/8", "1/2"),
    (2, 4, 1, 1, 4): ("1/8", "7/8", "7/8", "1/4"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what each rank found."""
    folder = tmp_path_factory.mktemp("reshard")
    script = Path(__file__).parents[3] / "benchmarks" / "reshard" / "ranks.py"
    result = folder / "result.json"
    arguments = [str(folder / "store"), str(result), str(WIDTH), str(UPDATES)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(WORLD), *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)[-4000:]
    return json.loads(result.read_text())


def by_layout(ranks, of="layouts"):
    """Return the figures of all ranks by layout."""
    return {tuple(case[0]["layout"]): case for case in zip(*(found[of] for found in ranks), strict=True)}


def of(share: str, whole: int = M) -> Fraction:
    return Fraction(share) * whole


def test_every_generating_shard_is_right_after_every_update(ranks):
    for of in ("layouts", "others"):
        for layout, case in by_layout(ranks, of).items():
            assert all(figures[name]["wrong"] == [] for figures in case for name in STRATEGIES), layout


def test_table_2(ranks):
    found = by_layout(ranks)
    assert found.keys() == TABLE_2.keys()
    for layout, (hybridflow, model_parallel, all_ranks, peak) in TABLE_2.items():
        p, t, _, _, _ = layout
        for figures in found[layout]:
            ours, gathered, flat = (figures[name] for name in STRATEGIES)
            assert ours["received"] == of(hybridflow), layout
            assert gathered["received"] == of(model_parallel), layout
            assert flat["received"] == of(all_ranks), layout
            assert (ours["peak"], gathered["peak"], flat["peak"]) == (of(peak), M, M), layout
            assert ours["redundant"] == M // (p * t), layout  # these shards live beside the buffer, as a run's do
            assert gathered["redundant"] == M // (p * t), layout
            assert flat["redundant"] == M // WORLD, layout
            assert ours["copied"] % (M // (p * t)) == 0, layout


def test_the_kernel_received_what_was_counted(ranks):
    """The counts are those of TCP but for gloo's headers and barriers, some 300 bytes a message."""
    for layout, case in by_layout(ranks).items():
        for figures in case:
            for name in STRATEGIES:
                got = figures[name]
                assert got["received"] <= got["kernel"] <= got["received"] * 1.05 + 20_000, (layout, name)


def test_what_tensor_ranks_do_not_divide_travels_between_stages_only(ranks):
    embedding, norm = 4 * 300 * WIDTH, 4 * WIDTH
    for (p, _, _, p_g, _), case in by_layout(ranks, "others").items():
        for rank, figures in enumerate(case):
            got = figures["hybridflow"]["received"]
            if p == p_g:
                assert got == 0
                continue
            stages = GenerationLayout(Layout(*figures["layout"][:3]), *figures["layout"][3:]).stages(rank)
            own = Layout(*figures["layout"][:3]).coordinates(rank).pp
            norms = (len(stages) - 1) * (4 // p) * norm
            # A stage that has the tied embeddings, the first or the last, gives them to the others of its replica.
            told = own not in (0, p - 1) or (own == p - 1 and p > 2 and 0 in stages)
            assert got == norms + (embedding if told else 0)


def test_buffers_are_let_go(ranks):
    for case in by_layout(ranks).values():
        assert all(figures[name]["held"] == 0 for figures in case for name in STRATEGIES)
