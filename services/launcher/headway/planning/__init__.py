"""What ``headway serve`` decides before it starts a process: the model, the services and their settings."""
