"""What an experiment shows: tables, pictures, the verdict, and the index of all pages."""
