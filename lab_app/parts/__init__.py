"""Pieces of pages: widgets and their state; what they show is computed in viewmodel."""
