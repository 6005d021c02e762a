"""Shared by commands, agents and the training program: descriptions, records, claims. Standard library only."""
