"""What runs tasks: local processes or Compose, and what they need of the machine."""
