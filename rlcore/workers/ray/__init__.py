"""Worker processes as Ray actors: the executor, its processes and pools, and results in the object store."""
