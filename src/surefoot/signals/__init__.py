"""What is normal for a number over a run, and when it stopped being so; numpy only, for live rows and for logs."""
