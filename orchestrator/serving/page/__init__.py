"""The web page at /: its files, and the routes that serve them."""
