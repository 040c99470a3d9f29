"""Engines: train, rollout, the hybrid of both in one worker, and the roles that algorithms call."""
