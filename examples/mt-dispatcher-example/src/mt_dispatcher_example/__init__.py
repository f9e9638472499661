"""A token dispatcher that counts the traffic between ranks."""
