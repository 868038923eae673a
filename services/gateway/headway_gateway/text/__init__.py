"""Between text and token ids; and chats and constraints, which are untrusted programs."""
