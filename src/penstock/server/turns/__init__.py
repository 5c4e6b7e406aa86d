"""One chat turn, whatever front end asked for it, and what is done to its prompt before."""
