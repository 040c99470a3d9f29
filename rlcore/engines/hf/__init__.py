"""`rollout=hf`: sampling with a Hugging Face module; the trained one itself if this process has all of it."""
