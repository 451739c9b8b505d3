"""How the shipped files of the world were made; nothing here is needed to use them."""
