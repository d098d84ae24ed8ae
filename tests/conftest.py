"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine makes any example slow once; how fast something is, is for a test of its own to say.
settings.register_profile("kvmesh", deadline=None)
settings.load_profile("kvmesh")
