"""The run folder: its layout, its records, and who may write them. What tasks wrote is checked when it is read."""
