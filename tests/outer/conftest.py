"""What tests of outer loops have in common."""

from support.replicas import all_end

__all__ = ["all_end"]
