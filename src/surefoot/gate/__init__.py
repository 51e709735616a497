"""The gate inside the optimizer's step: refuses an update or clips it, before it lands."""
