"""What the files of a durable checkpoint are: manifests, and the records of torch."""
