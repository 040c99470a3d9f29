"""`rollout=vllm`: sampling with vLLM in the worker's process."""
