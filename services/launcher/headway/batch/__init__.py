"""``headway batch``: a file of requests in, a file of answers out, through a gateway's HTTP API."""
