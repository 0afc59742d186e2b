"""The grader: cases, oracle and verdict stay here; student code runs in a locked worker process."""
