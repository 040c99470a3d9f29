"""The whole suite of rollout engines, on vLLM."""

from rlcore_plugin_testing import conformance

test_vllm = conformance("rollout=vllm", "rollout.vllm.memory=64")
