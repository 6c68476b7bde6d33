"""The models and their commands; no model imports another."""
