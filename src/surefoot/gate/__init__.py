"""The gate inside the optimizer's step: refuses or clips an update before it is applied."""
