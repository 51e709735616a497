"""What a run did and what that means: its course found in a table, looked at for every sign of trouble."""
