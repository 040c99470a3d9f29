"""Resharding: from the shards that training holds to those that generation needs (HybridFlow, arXiv 2409.19256)."""
