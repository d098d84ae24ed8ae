"""The plumbing that every service of the mesh needs once.

Configuration, identities, channels, news, telemetry and process lifecycle. It
starts services by name and knows nothing of what they do.
"""
