"""The signs of trouble in a run's course, one a file: each looks at the course and speaks, or is silent."""
