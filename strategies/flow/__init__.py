"""Flow: learns the order in which a program uses its blocks, and fetches ahead of need."""

from .flow import Flow

__all__ = ["Flow"]
