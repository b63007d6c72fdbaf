"""The nouns that every room shares, as data: what is sent, how, and what is expected of it."""
