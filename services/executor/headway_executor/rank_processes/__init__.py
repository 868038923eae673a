"""The processes of an executor of several ranks: one leads, the others follow."""
