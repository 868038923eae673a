"""The sockets to the scheduler, and the step protocol on them."""
