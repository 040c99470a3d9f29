"""The conformance suite of rollout engines."""
