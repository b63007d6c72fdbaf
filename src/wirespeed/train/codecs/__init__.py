"""Codecs: how one bucket of gradients is made small, sent and put together again."""
