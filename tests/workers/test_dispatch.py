"""How arguments are cut up and results joined, without any process."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rlcore.errors import ConfigError, DataError
from rlcore.protocol import DataProto, Ragged
from rlcore.protocol.balance import SplitBatch
from rlcore.workers import Dispatch, Execute, Mesh, Worker, register
from rlcore.workers.dispatch import as_mode, calls_of, join_rows, rows_over, split_rows
from rlcore.workers.worker import registered_methods, registration_of


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)}, non_tensors={"name": [f"r{i}" for i in range(rows)]})


def group_of(*coordinates: dict[str, int]) -> SimpleNamespace:
    return SimpleNamespace(world_size=len(coordinates), mesh=Mesh(coordinates))


@given(rows=st.integers(0, 20), parts=st.integers(1, 8))
def test_split_then_join_is_identity_and_sizes_differ_by_one_at_most(rows: int, parts: int) -> None:
    batch = batch_of(rows)
    cut = split_rows(batch, parts)
    sizes = [len(part) for part in cut]
    assert len(cut) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    joined = join_rows(cut)
    assert joined["x"].tolist() == list(range(rows))
    assert list(joined["name"]) == list(batch["name"])


def test_split_cuts_batches_inside_containers_and_gives_the_rest_whole() -> None:
    other = object()
    first, second = split_rows([(batch_of(3), other), {"batch": batch_of(1), "lr": 0.5}], 2)
    assert [len(first[0][0]), len(second[0][0])] == [2, 1]
    assert [len(first[1]["batch"]), len(second[1]["batch"])] == [1, 0]
    assert first[0][1] is second[0][1] is other
    assert first[1]["lr"] == second[1]["lr"] == 0.5
    config = {"a": [1, 2]}
    assert split_rows(config, 2) == [config, config]
    assert split_rows(config, 2)[1] is config


def test_join_takes_tensors_ragged_columns_and_none() -> None:
    assert join_rows([torch.tensor([1]), torch.tensor([2, 3])]).tolist() == [1, 2, 3]
    joined = join_rows([Ragged.from_list([torch.tensor([1, 2])]), Ragged.from_list([torch.tensor([3])])])
    assert [row.tolist() for row in joined.to_list()] == [[1, 2], [3]]
    assert join_rows([["a"], [], ["b", "c"]]) == ["a", "b", "c"]
    assert join_rows([None, None]) is None


def test_join_leaves_out_batches_without_rows_whatever_their_columns() -> None:
    joined = join_rows([DataProto.from_dict(tensors={}), batch_of(2), batch_of(0)])
    assert joined["x"].tolist() == [0, 1]
    assert len(join_rows([batch_of(0), batch_of(0)])) == 0


@pytest.mark.parametrize("outputs", [[1, 2], [batch_of(1), None], [torch.tensor(1.0), torch.tensor(2.0)]])
def test_join_of_other_types_says_what_to_return(outputs: list[object]) -> None:
    with pytest.raises(DataError, match="cannot be joined by rows; return a DataProto"):
        join_rows(outputs)


def three_d(pp: int, tp: int, dp: int) -> SimpleNamespace:
    """A group of pp * tp * dp ranks, tp fastest and dp slowest, as the paper numbers them."""
    return group_of(
        *({"pp": p, "tp": t, "dp": d} for d, p, t in itertools.product(range(dp), range(pp), range(tp))),
    )


def hybrid(tp: int, generating_tp: int, dp: int) -> SimpleNamespace:
    """Trains with (1, tp, dp) and generates with tensor-parallel groups of every (tp / generating_tp)-th rank."""
    micro = tp // generating_tp
    return group_of(*({"tp": t, "dp": d, "micro_dp": t % micro} for d in range(dp) for t in range(tp)))


def rows_of(mode: Dispatch, group: SimpleNamespace, rows: int) -> list[list[int]]:
    calls = calls_of(mode.value, group, [batch_of(rows)], {})
    return [call[0][0]["x"].tolist() for call in calls]


def collected(mode: Dispatch, group: SimpleNamespace) -> object:
    """Return what comes of each rank's returning a column with its own number."""
    out = mode.value.collect(group, [torch.tensor([rank]) for rank in range(group.world_size)])
    return out.tolist() if isinstance(out, torch.Tensor) else [int(one) for one in out]


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        (Dispatch.PROTO_3D, [2, 6]),  # the last stage's first rank of each dp
        (Dispatch.PP_ONLY_3D, [0, 2]),  # each stage's rank at tp=0, dp=0
        (Dispatch.DP_COMPUTE_PROTO, [0, 4]),
        (Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, [0, 4]),
        (Dispatch.DP_COMPUTE_METRIC, [0, 4]),
        (Dispatch.DP_COMPUTE, [0, 4]),
        (Dispatch.ALL_MICRO_DP_3D, [0, 4]),  # one generating replica for each training replica
        (Dispatch.ALL_RANKS_PROTO, [*range(8)]),
        (Dispatch.ONE_TO_ALL, [*range(8)]),
        (Dispatch.ALL_TO_ALL, [*range(8)]),
        (Dispatch.RANK_ZERO, [0]),
    ],
    ids=lambda value: value.name if isinstance(value, Dispatch) else "",
)
def test_whose_results_count_in_a_mesh_of_2_2_2(mode: Dispatch, ranks: list[int]) -> None:
    """Rank = 4 dp + 2 pp + tp."""
    assert collected(mode, three_d(2, 2, 2)) == ranks


BY_ROWS = [Dispatch.PROTO_3D, Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC, Dispatch.ALL_MICRO_DP_3D]


@pytest.mark.parametrize("mode", BY_ROWS, ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    ("rows", "first", "second"), [(4, [0, 1], [2, 3]), (5, [0, 1, 2], [3, 4]), (1, [0], []), (0, [], [])]
)
def test_all_ranks_of_a_dp_place_get_its_rows(mode: Dispatch, rows: int, first: list[int], second: list[int]) -> None:
    assert rows_of(mode, three_d(2, 2, 2), rows) == [first] * 4 + [second] * 4


def test_rows_over_all_ranks() -> None:
    """Rank = 4 dp + 2 pp + tp: rows are halved over dp, each half over pp, and that over tp."""
    assert rows_of(Dispatch.ALL_RANKS_PROTO, three_d(2, 2, 2), 9) == [[0, 1], [2], [3], [4], [5], [6], [7], [8]]


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, Dispatch.PP_ONLY_3D, Dispatch.RANK_ZERO])
def test_modes_that_cut_nothing(mode: Dispatch) -> None:
    assert rows_of(mode, three_d(2, 2, 2), 3) == [[0, 1, 2]] * 8


def test_each_generating_replica_gets_one_slice() -> None:
    """HybridFlow's figure 8: (1, 4, 2) trains, tp 2 generates in the ranks {0, 2}, {1, 3}, {4, 6}, {5, 7}."""
    group = hybrid(tp=4, generating_tp=2, dp=2)
    a, b, c, d = [0, 1], [2, 3], [4, 5], [6, 7]
    assert rows_of(Dispatch.ALL_MICRO_DP_3D, group, 8) == [a, b, a, b, c, d, c, d]
    assert rows_of(Dispatch.PROTO_3D, group, 8) == [a + b] * 4 + [c + d] * 4
    assert collected(Dispatch.ALL_MICRO_DP_3D, group) == [0, 1, 4, 5]


@given(rows=st.integers(0, 40), dp=st.integers(1, 4), micro=st.integers(1, 4))
def test_a_training_replica_generates_the_rows_it_trains_on(rows: int, dp: int, micro: int) -> None:
    group = hybrid(tp=micro, generating_tp=1, dp=dp)
    slices = rows_of(Dispatch.ALL_MICRO_DP_3D, group, rows)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1
    trained = rows_of(Dispatch.PROTO_3D, group, rows)
    for replica in range(dp):
        made = slices[replica * micro : (replica + 1) * micro]
        assert list(itertools.chain(*made)) == trained[replica * micro]
    assert list(itertools.chain(*slices)) == list(range(rows))


@pytest.mark.parametrize("mode", list(Dispatch), ids=lambda mode: mode.name)
def test_ranks_that_need_the_same_get_the_very_same_object(mode: Dispatch) -> None:
    """An executor puts what several ranks get into the store once, and knows it by its identity."""
    group = hybrid(tp=4, generating_tp=2, dp=2)
    slices = {"ALL_TO_ALL": 8, "DP_COMPUTE": 2}.get(mode.name)
    batch = batch_of(8)
    value = [{"x": torch.zeros(row + 1)} for row in range(slices)] if slices else {"batch": batch, "rate": [0.5]}
    args = [len, value] if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC else [value]
    calls = calls_of(mode.value, group, args, {"named": value})
    different = {
        "ALL_TO_ALL": 8,
        "ALL_RANKS_PROTO": 8,
        "ALL_MICRO_DP_3D": 4,
        "ONE_TO_ALL": 1,
        "PP_ONLY_3D": 1,
        "RANK_ZERO": 1,
    }
    assert len({id(call[0][-1]) for call in calls}) == different.get(mode.name, 2)
    assert len({id(call[1]["named"]) for call in calls}) == different.get(mode.name, 2)


def test_lists_for_each_data_parallel_rank() -> None:
    group = three_d(1, 2, 2)
    calls = calls_of(Dispatch.DP_COMPUTE.value, group, [["a", "b"]], {"k": (1, 2)})
    assert calls == [(("a",), {"k": 1})] * 2 + [(("b",), {"k": 2})] * 2
    with pytest.raises(DataError, match=r"DP_COMPUTE: argument 0 is 4 values.*each of the 2 data-parallel ranks"):
        calls_of(Dispatch.DP_COMPUTE.value, group, [[1, 2, 3, 4]], {})
    with pytest.raises(DataError, match="DP_COMPUTE: argument 'k' is DataProto"):
        calls_of(Dispatch.DP_COMPUTE.value, group, [], {"k": batch_of(2)})


def test_a_function_goes_to_all_with_rows_of_their_own() -> None:
    group = three_d(1, 2, 2)
    mode = Dispatch.DP_COMPUTE_PROTO_WITH_FUNC.value
    calls = calls_of(mode, group, [len, batch_of(3)], {"more": batch_of(1)})
    assert all(call[0][0] is len for call in calls)
    assert [call[0][1]["x"].tolist() for call in calls] == [[0, 1]] * 2 + [[2]] * 2
    assert [len(call[1]["more"]) for call in calls] == [1, 1, 0, 0]
    for wrong, got in (([batch_of(3), len], "DataProto"), ([], "none")):
        with pytest.raises(DataError, match=f"the first positional argument must be a function, got {got}"):
            calls_of(mode, group, wrong, {})


@pytest.mark.parametrize("mode", [Dispatch.PROTO_3D, Dispatch.DP_COMPUTE_METRIC, Dispatch.DP_COMPUTE_PROTO])
def test_a_batch_that_is_cut_already_is_cut_so(mode: Dispatch) -> None:
    batch, group = batch_of(4), three_d(2, 2, 2)
    cut = SplitBatch((batch[[3]], batch[[0, 2, 1]]))
    calls = calls_of(mode.value, group, [{"inside": cut}], {"more": cut})
    assert [call[0][0]["inside"]["x"].tolist() for call in calls] == [[3]] * 4 + [[0, 2, 1]] * 4
    assert [call[1]["more"] for call in calls] == [cut.parts[0]] * 4 + [cut.parts[1]] * 4
    with pytest.raises(DataError, match="was split into 3 parts is to be split into 2"):
        calls_of(mode.value, group, [SplitBatch((batch, batch, batch))], {})


@pytest.mark.parametrize(
    "mode",
    [
        *(Dispatch.DP_COMPUTE_PROTO, Dispatch.PROTO_3D, Dispatch.ALL_MICRO_DP_3D, Dispatch.ALL_RANKS_PROTO),
        *(Dispatch.DP_COMPUTE_METRIC, Dispatch.DP_COMPUTE_PROTO_WITH_FUNC),
    ],
    ids=lambda mode: mode.name,
)
def test_rows_in_no_batch_are_refused_and_not_given_whole_to_all(mode: Dispatch) -> None:
    """Two ranks would each get four rows, and eight would come back."""
    group = three_d(1, 1, 2)
    tensor_dict = TensorDict({"x": torch.zeros(4)}, batch_size=[4])
    first = [len] if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC else []
    for rows in (torch.zeros(4), np.zeros((4, 2)), Ragged.from_list([[1.0], [], [2.0], []]), tensor_dict):
        for args, kwargs in (([rows], {}), ([batch_of(4), rows], {}), ([batch_of(4)], {"extra": rows})):
            with pytest.raises(DataError, match=f"is a {type(rows).__name__} of 4 entries, which .* whole to every"):
                calls_of(mode.value, group, [*first, *args], kwargs)
    with pytest.raises(DataError, match=r"argument 0 is a list of 4 entries.*ONE_TO_ALL"):
        calls_of(mode.value, group, [*first, [1, 2, 3, 4]], {})
    # What every rank needs: numbers, a tensor of one number, a dict, and a list beside a batch.
    whole = {"scale": torch.tensor(2.0), "names": ["a", "b"], "weights": {"w": torch.zeros(4)}, "nothing": []}
    for _, named in calls_of(mode.value, group, [*first, batch_of(4)], whole):
        assert all(named[name] is value for name, value in whole.items())


def test_metrics_of_ranks_become_a_list_and_other_meta_info_must_agree() -> None:
    def result(rows: int, **meta: object) -> DataProto:
        return DataProto.from_dict({"x": torch.arange(rows)}, meta_info=meta)

    joined = join_rows([result(2, metrics={"loss": 1.0}, step=3), result(1, metrics={"loss": 2.0}, step=3)])
    assert joined["x"].tolist() == [0, 1, 0]
    assert joined.meta_info == {"metrics": [{"loss": 1.0}, {"loss": 2.0}], "step": 3}
    without_rows = [DataProto(meta_info={"metrics": rank, "step": 3}) for rank in range(2)]
    assert join_rows(without_rows).meta_info == {"metrics": [0, 1], "step": 3}
    idle = join_rows([result(2, metrics=5), DataProto(meta_info={"metrics": 6, "only_here": True}), result(0)])
    assert (len(idle), idle.meta_info) == (2, {"metrics": [5, 6], "only_here": True})
    for others in ([result(1, step=4)], [DataProto(meta_info={"step": 4})]):
        with pytest.raises(DataError, match="meta_info 'step' differs between the batches: 3 and 4"):
            join_rows([result(2, step=3), *others])


def test_stages_lists_are_joined_end_to_end() -> None:
    outputs = [["embed", f"layers.{rank}"] for rank in range(8)]
    assert Dispatch.PP_ONLY_3D.value.collect(three_d(2, 2, 2), outputs) == ["embed", "layers.0", "embed", "layers.2"]


def test_an_axis_that_no_worker_declares_has_one_place() -> None:
    pure_dp = group_of({"dp": 0}, {"dp": 1})
    assert pure_dp.mesh.size("pp") == pure_dp.mesh.size("micro_dp") == 1
    assert rows_of(Dispatch.PROTO_3D, pure_dp, 3) == rows_of(Dispatch.ALL_MICRO_DP_3D, pure_dp, 3) == [[0, 1], [2]]
    assert collected(Dispatch.PROTO_3D, pure_dp) == [0, 1]
    assert collected(Dispatch.PP_ONLY_3D, pure_dp) == [0]
    pure_tp = group_of({"tp": 1}, {"tp": 0})
    assert rows_of(Dispatch.DP_COMPUTE_PROTO, pure_tp, 2) == [[0, 1], [0, 1]]
    assert collected(Dispatch.PROTO_3D, pure_tp) == [1]


def test_a_second_mesh_is_an_error_and_the_first_stays() -> None:
    worker = Base()
    worker.set_mesh(dp=1)
    with pytest.raises(ConfigError, match=r"set_mesh\(\{'dp': 0\}\) is the second call, after \{'dp': 1\}"):
        worker.set_mesh(dp=0)
    assert worker._read_mesh() == {"dp": 1}


def test_an_axis_that_is_none_is_an_error_wherever_it_is_named() -> None:
    said = r"no axis 'ddp'; there are pp, tp, dp, micro_dp. Did you mean 'dp'\?"
    with pytest.raises(ConfigError, match=said):
        Base().set_mesh(ddp=0)
    with pytest.raises(ConfigError, match=said):
        Mesh(({"ddp": 0},))
    with pytest.raises(ConfigError, match=said):
        Mesh(({"dp": 0},)).size("ddp")
    with pytest.raises(ConfigError, match=said):
        calls_of(rows_over("MINE", "ddp"), group_of({"dp": 0}), [batch_of(1)], {})


@pytest.mark.parametrize(
    ("coordinates", "said"),
    [
        ([{"dp": 0}, {"tp": 0}], r"rank 1 declares the axes \['tp'\], rank 0 \['dp'\]"),
        ([{"dp": 0}, {"dp": 2}], r"2 ranks declare 3 positions along dp: no rank is at dp=1.*rank 1: {'dp': 2}"),
        (
            [{"tp": 0, "dp": 0}, {"tp": 1, "dp": 0}, {"tp": 0, "dp": 1}],
            r"3 ranks declare 4 positions along tp, dp: no rank is at tp=1, dp=1",
        ),
        (
            [{"pp": 0, "tp": t % 2, "dp": 0} for t in range(3)],
            r"3 ranks declare 2 positions along pp, tp, dp: ranks \[0, 2\] are all at pp=0, tp=0, dp=0",
        ),
    ],
)
def test_mesh_refuses_ranks_that_have_no_place_of_their_own(coordinates: list[dict[str, int]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Mesh(tuple(coordinates))


def test_mesh_refuses_a_slice_without_a_rank_or_without_one_that_answers() -> None:
    """The generating replica 1 of dp=1 is not there; and no rank of dp=1 is at micro_dp=1."""
    group = group_of({"dp": 0, "micro_dp": 0}, {"dp": 0, "micro_dp": 1}, {"dp": 1, "micro_dp": 0})
    with pytest.raises(ConfigError, match="4 positions along dp, micro_dp: no rank is at dp=1, micro_dp=1"):
        rows_of(Dispatch.ALL_MICRO_DP_3D, group, 4)
    with pytest.raises(ConfigError, match=r"none of the ranks \[2\], which get the same rows, is at {'micro_dp': 1}"):
        rows_over("MINE", "dp", micro_dp=-1).collect(group, [torch.zeros(1)] * 3)


def test_names_of_the_paper() -> None:
    names = ["ONE_TO_ALL", "3D_PROTO", "3D_ALL_MICRO_DP", "3D_PP_ONLY", "DP_PROTO", "ALL_TO_ALL"]
    assert [Dispatch.from_paper(name).name for name in names] == [
        "ONE_TO_ALL",
        "PROTO_3D",
        "ALL_MICRO_DP_3D",
        "PP_ONLY_3D",
        "DP_COMPUTE_PROTO",
        "ALL_TO_ALL",
    ]
    with pytest.raises(ConfigError, match=r"no transfer protocol '3D_PROT'; it names ONE_TO_ALL, .* mean '3D_PROTO'\?"):
        Dispatch.from_paper("3D_PROT")


def test_per_worker_lists_must_fit_the_workers() -> None:
    group = group_of({"dp": 0}, {"dp": 1})
    with pytest.raises(DataError, match=r"argument 0 is 3 values.*each of the 2 workers"):
        calls_of(Dispatch.ALL_TO_ALL.value, group, [[1, 2, 3]], {})
    with pytest.raises(DataError, match="argument 'x' is int"):
        calls_of(Dispatch.ALL_TO_ALL.value, group, [], {"x": 1})


def test_custom_pair_takes_both_forms_and_checks_their_length() -> None:
    group = group_of({"dp": 0}, {"dp": 1})

    def chunks(group: object, data: torch.Tensor) -> object:
        return data.chunk(2)

    def lists(group: object, *args: object, **kwargs: object) -> object:
        return tuple([arg, arg] for arg in args), {name: [value, None] for name, value in kwargs.items()}

    one = as_mode({"dispatch_fn": chunks, "collect_fn": lambda group, outputs: outputs})
    assert [call[0][0].tolist() for call in calls_of(one, group, [torch.arange(4)], {})] == [[0, 1], [2, 3]]
    rows = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    assert [call[0][0]["x"].tolist() for call in calls_of(one, group, [rows], {})] == [[0, 1], [2, 3]]
    both = as_mode({"dispatch_fn": lists, "collect_fn": lambda group, outputs: outputs})
    assert calls_of(both, group, [1], {"k": 2}) == [((1,), {"k": 2}), ((1,), {"k": None})]
    with pytest.raises(DataError, match="split into 1 values for 2 workers"):
        calls_of(one, group, [torch.arange(1)], {})


@pytest.mark.parametrize("mode", ["dp", {"dispatch_fn": len}, {"dispatch_fn": len, "collect_fn": 3}])
def test_register_refuses_what_is_no_mode(mode: object) -> None:
    with pytest.raises(ConfigError, match=r"DP_COMPUTE_PROTO.*dispatch_fn"):
        register(dispatch_mode=mode)


class Base(Worker):
    @register(Dispatch.RANK_ZERO, Execute.ALL, blocking=False)
    def opened(self) -> int:
        return 1

    def closed(self) -> int:
        return 1


class Overrides(Base):
    def opened(self) -> int:
        return 2


def test_an_override_keeps_the_registration_of_its_base() -> None:
    registration = registration_of(Overrides, "opened")
    assert registration is not None
    assert (registration.mode.name, registration.blocking) == ("RANK_ZERO", False)
    assert registered_methods(Overrides) == ["opened"]


def test_modes_pickle_by_name() -> None:
    for mode in Dispatch:
        assert pickle.loads(pickle.dumps(mode)) is mode


def test_a_worker_made_by_hand_is_rank_0_of_1() -> None:
    worker = Base()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.device) == (0, 1, 0, torch.device("cpu"))


@pytest.mark.parametrize("coordinates", [{}, {"dp": -1}, {"dp": 0.5}, {"dp": True}])
def test_mesh_coordinates_are_integers_from_0(coordinates: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="needs integers from 0"):
        Base().set_mesh(**coordinates)
