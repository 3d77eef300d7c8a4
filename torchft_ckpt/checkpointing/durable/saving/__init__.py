"""A state on its way into a durable checkpoint."""
