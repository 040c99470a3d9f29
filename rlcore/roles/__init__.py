"""The controller's side of model roles: handles by kind, placement on pools, rollout pools, and how roles start."""
