"""`rollout=hf`: sampling with a Hugging Face module, the trained one itself where it is whole in this process."""
