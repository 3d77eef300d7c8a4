"""Receiving a state onto another layout: boxes of tensors, put together from all ranks that hold some of them."""
