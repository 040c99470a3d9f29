"""A run: its checks, its loop, its folder with checkpoints, its evaluations and its metrics."""
