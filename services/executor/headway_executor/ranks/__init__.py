"""An executor of several ranks: one step link, several processes."""
