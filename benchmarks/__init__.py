"""What is measured, against whom, and the last results with their conditions. `make bench B=name` runs one."""
