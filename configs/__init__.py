"""The config groups and experiments that ship with rlcore, as YAML for hydra."""
