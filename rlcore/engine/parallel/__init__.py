"""How a model is spread over ranks: layouts, meshes, and the layouts that a model's shape allows."""
