"""What a task is asked for before an experiment starts; every mistake is one sentence."""
