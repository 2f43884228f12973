"""How metrics are reduced, and where they are written."""
