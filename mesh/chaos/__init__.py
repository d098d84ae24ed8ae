"""Breaks a running test mesh in every way and at every moment, and counts what clients see."""
