"""What the gateway counts and traces, and its reports of load."""
