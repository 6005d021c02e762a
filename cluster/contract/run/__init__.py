"""The run folder: its layout and records, heartbeats, logs, claims and provenance. Records are checked when read."""
