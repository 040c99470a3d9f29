"""Benchmarks of episodes: what the tiny model learns in environments. `make bench B=episodes` runs them."""
