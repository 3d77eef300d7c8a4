"""The files of a durable checkpoint: manifests, and the records of torch."""
