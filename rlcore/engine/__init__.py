"""What every engine shares, and the interface for engines of your own. Runs in worker processes."""
