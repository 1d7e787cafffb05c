"""What a model is made of: its arrays by name, what a round does with each, and the flat vector."""
