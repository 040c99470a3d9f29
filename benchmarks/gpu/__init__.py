"""One GPU: what it does at most, what rlcore does on it, and what is wrong."""
