"""What operators see: numbers, the log, what holds the event loop."""
