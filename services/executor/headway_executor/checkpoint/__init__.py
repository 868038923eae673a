"""A checkpoint's files: fields, tensors, and the forms in which weights are stored."""
