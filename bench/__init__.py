"""Measuring: `kvmesh bench NAME`. One module per command; a service is only ever reached over its wire."""
