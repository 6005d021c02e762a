"""The run folder: its layout and records, heartbeats, logs, and whose run it is. Records are checked when read."""
