"""Prompt data sets, chat templates, and the resumable loader."""
