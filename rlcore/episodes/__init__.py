"""Multi-turn episodes: turns in tokens, tool calls, environments."""
