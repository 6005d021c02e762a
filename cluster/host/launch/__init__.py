"""From a request to a run that is started, and to its end."""
