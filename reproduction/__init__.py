"""The paper's tables and figures as data (``files/*.toml``), and what runs and shows them."""
