"""What gateways send and get: submissions, tokens, ends, and when a refused request may try again."""
