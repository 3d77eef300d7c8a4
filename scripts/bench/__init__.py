"""Figures of the recovery benchmark, each beside its bar; `scripts/bench_recovery` sets up the environment and starts it."""
