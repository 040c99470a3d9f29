"""A model that really speaks: SmolLM2-135M-Instruct, made into a folder, and trained on word questions."""
