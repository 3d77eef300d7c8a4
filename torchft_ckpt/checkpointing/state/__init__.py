"""A state, seen from here: its tree and tensors, where their bytes lie, and the format that describes them."""
