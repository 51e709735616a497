"""Shows a diagnosis: wording, terminal page, plots, HTML page, and the comparison of two logs."""
