"""What several tests share: real replica groups as processes, and the lighthouse as one."""
