"""The `kvmesh` commands. One module per command; each imports what it needs when it runs,
so that `status` and `version` answer at once.
"""
