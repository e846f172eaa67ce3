"""Adapters of third-party environment families."""
