"""The loop over a real script: runs it under strategies, compares prediction with measurement and loss with loss."""
