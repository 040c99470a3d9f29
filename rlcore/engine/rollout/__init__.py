"""Rollout engines: responses from prompts, with the log-probs of what was sampled."""
