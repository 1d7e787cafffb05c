"""What memories and scores can and cannot do, on clients whose updates drift: an experiment of this project."""
