"""The suite of algorithms: real runs on the tiny model, and the losses that reached `update` in them."""
