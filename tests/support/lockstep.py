"""Replicas on threads whose managers agree by script, as `torchft_ckpt.testing` ships them."""

from torchft_ckpt.testing.fake_outer_manager import FakeOuterManager as ScriptedManager
from torchft_ckpt.testing.fake_outer_manager import Hub, mean_of, run_replicas

__all__ = ["Hub", "ScriptedManager", "mean_of", "run_replicas"]
