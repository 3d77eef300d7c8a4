"""Which bytes of a state come from where. Decisions only, as all of `core`.

scheduler  which unit of a state, a block or a box, comes from which source
paths      over which of a source's addresses it comes
pages      with which pages fresh memory is touched
"""
