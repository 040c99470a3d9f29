"""Train engines: log-probs, and optimizer steps whose gradient does not depend on how a batch was cut."""
