"""What commands, agents and the training program share: descriptions, records, claims. Standard library only."""
