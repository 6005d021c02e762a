"""Imports, checks and rehearsals before a run begins."""
