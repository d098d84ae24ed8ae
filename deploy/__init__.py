"""Configuration of the parts that are not ours: Envoy at the edge and NATS.

Pure functions from dataclasses to documents. Imports nothing of the mesh.
"""
