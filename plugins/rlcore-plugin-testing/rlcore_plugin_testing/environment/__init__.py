"""The conformance suite of environments."""
