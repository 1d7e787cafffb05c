"""What is to be seen of runs while they go on: bars, pages, and what a plan foresaw."""
