"""The front of a service, between it and whoever reaches its port: limits, before anything is read of what a client says."""
