"""How weights travel from a train engine to a rollout engine: routes, resharding, transfer between processes."""
