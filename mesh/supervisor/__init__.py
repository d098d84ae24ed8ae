"""Starts, watches, restarts and stops the processes of one mesh on one machine.

Reads top down: `options` (what was asked), `state` (where things lie), `plan` (which
processes that means), `process` (one of them), `watch` (when one hangs), `mesh` (all
of them), `control` (how the CLI talks to it). It never speaks gRPC.
"""
