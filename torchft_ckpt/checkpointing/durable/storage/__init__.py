"""Places that hold files: a directory of this machine, or what fsspec knows."""
