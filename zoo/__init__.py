"""The models and their commands; no model imports another."""

__version__ = "0.1.0"
