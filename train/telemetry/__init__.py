"""What a task reports while it trains."""
