"""The loss contract, written once for every train engine: counts, micro-batches, normalisation, corrections."""
