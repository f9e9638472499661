"""Images: with classes, and with texts; made up, and from files."""
