"""What our runs are compared with, written by hand as the tutorials do; nothing here knows `cluster` or `train`."""
