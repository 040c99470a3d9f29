"""`engine=torch`: training with torch's FSDP2, tensor and pipeline parallelism."""
