"""One GPU: the card's ceilings, rlcore's figures on it, and faults."""
