"""The exercises room: a student's part is graded by running it, locked away, in the real thing."""
