"""What stands between a service and whoever reaches its port: limits, before anything is read of what a client says."""
