"""A deployment on several machines: an engine places, heals and scales the processes."""
