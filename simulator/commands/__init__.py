"""The commands of `python -m simulator`: each file one command, thin over the room's functions."""
