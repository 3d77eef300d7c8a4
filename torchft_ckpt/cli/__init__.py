"""The commands of `python -m torchft_ckpt`: what each takes, and what it prints. Decisions are made on the floors below."""
