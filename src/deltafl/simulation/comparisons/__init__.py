"""Many runs beside each other: comparisons, learning rates, pilots, and how Python calls them."""
