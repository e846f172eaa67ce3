"""Fast implementations, each of something that works without them."""
