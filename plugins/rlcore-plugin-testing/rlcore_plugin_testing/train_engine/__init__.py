"""The suite over a train engine: small updates, held against plain autograd on the same Hugging Face model."""
