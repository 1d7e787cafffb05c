"""The folder of a run or a comparison: its files, its records, and by what code it was played."""
