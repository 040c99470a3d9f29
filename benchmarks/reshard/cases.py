"""The layouts of the benchmark, as data: the ranks run these, and the bars are declared from them. Imports nothing."""

LAYOUTS = [
    # p, t, d in training; stages p_g and tensor shards t_g in generation
    (1, 8, 1, 1, 2),
    (1, 8, 1, 1, 1),
    (1, 8, 1, 1, 8),
    (1, 4, 2, 1, 2),
    (1, 2, 4, 1, 1),
    (2, 4, 1, 2, 2),
    (2, 4, 1, 1, 2),
    (2, 2, 2, 1, 1),
    (4, 2, 1, 2, 1),
    (2, 4, 1, 1, 4),
]
"""Layouts under which the strategies are compared."""

LIVE = [
    # p, t, d in training; tensor shards in generation; data-parallel ranks that share a copy (0: all)
    (1, 8, 1, 2, 0),
    (1, 8, 1, 1, 0),
    (1, 8, 1, 8, 0),
    (1, 4, 2, 2, 1),
    (1, 4, 2, 2, 0),
    (1, 2, 4, 1, 1),
    (1, 2, 4, 1, 0),
    (2, 4, 1, 2, 0),
    (2, 4, 1, 4, 0),
    (2, 2, 2, 1, 1),
    (2, 2, 2, 1, 0),
]
"""Table 2's layouts that generate on one stage, as every rollout engine does, with copies along dp and with shards."""
