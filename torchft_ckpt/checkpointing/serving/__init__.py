"""Serving a state: fixed in one step, over HTTP, within limits, without holding up who trains."""
