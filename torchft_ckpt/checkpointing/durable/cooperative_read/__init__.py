"""Many ranks that read one checkpoint: each byte leaves storage once."""
