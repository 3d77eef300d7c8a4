"""Being called by torchft's names: `names` says which of them are where, `torchft` puts this package in torchft's place."""
