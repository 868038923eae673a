"""Tools to study Headway. Nothing that serves imports them."""
