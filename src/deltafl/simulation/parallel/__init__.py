"""Where runs are played: one after the other, in processes side by side, or on other machines."""
